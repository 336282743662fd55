"""Which layout every value has: the cheapest mix of kernels and reorders."""

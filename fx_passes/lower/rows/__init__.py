"""Rules of normalizations, softmax and reductions."""

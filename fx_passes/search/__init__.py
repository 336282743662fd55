"""Measure candidates, compare them with plain PyTorch, and remember the results."""

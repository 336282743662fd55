"""What can be computed before the first call, or not at all."""

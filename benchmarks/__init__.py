"""Side-by-side benchmarks against the other ways to run a PyTorch model on a CPU: see compare.py."""

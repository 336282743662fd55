"""What `make demo` runs, and the model helpers that the demo, the zoo tests and the benchmarks share."""

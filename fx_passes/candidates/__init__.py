"""What the stages of lowering share: ways to compute an operation, layouts, shapes and dtypes."""

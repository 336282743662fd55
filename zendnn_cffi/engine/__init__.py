"""The C library: where it is, whether it may be used here, and whether it is what the declarations say."""

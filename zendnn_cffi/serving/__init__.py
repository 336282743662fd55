"""Several processes that answer calls of one saved module."""

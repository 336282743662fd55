"""Fewer, larger operations."""

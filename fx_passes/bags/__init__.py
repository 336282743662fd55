"""Bags between offsets: the module that computes those of all tables, outside of regions."""

"""Rules of what is computed element by element."""

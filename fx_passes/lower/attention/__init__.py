"""Rules of attention, its positions and its caches."""

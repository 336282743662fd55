"""Rules of linear layers and matrix products."""

"""Rules of views, copies, concatenations and rows by index."""

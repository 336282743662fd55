"""Questions about nodes and graphs, and edits that every pass shares."""

"""Programs: lists of calls whose arguments are all built beforehand, and the memory they run in."""

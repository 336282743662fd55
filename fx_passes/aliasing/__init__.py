"""What a node may do to memory that it was given, and whose memory a value may be."""

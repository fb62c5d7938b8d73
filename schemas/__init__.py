"""What must agree on both ends of every wire."""

"""Which model visits which partition next, and where."""

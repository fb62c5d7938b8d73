"""Client requests, which become inputs of the core, and replies made from the core's state."""

"""Client requests: turn them into inputs of the core, and the core's state into replies."""

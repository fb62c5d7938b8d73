"""Which samples each worker takes in which step: pure, the same on every worker."""

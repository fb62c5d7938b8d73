"""Whoever makes plans: a policy in this process, or a search in one of its own."""

"""Makers of plans: a policy in this process, or a search in a child process."""

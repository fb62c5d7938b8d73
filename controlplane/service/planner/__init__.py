"""Planners, which run a policy in this process, or a search in a child process."""

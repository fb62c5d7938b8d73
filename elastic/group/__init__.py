"""Membership of this worker in its job's group, and changes of that group."""

"""Membership of this worker in the group of its job, and changes of that group."""

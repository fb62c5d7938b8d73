"""This worker's place in its job's group, and changes of the group."""

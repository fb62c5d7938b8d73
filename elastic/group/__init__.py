"""This worker's place in its job's group, and the change to the next one."""

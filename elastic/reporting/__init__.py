"""The worker's reports to its node agent, off the training thread."""

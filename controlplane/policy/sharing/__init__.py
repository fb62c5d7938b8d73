"""Division of a cluster's slots among accounts, before a policy decides about the jobs."""

"""Model of the cluster: jobs, workers, nodes, group changes, and their transition tables."""

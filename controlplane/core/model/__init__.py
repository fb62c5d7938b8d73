"""Model of the cluster, with jobs, workers, nodes, group changes and their transition tables."""

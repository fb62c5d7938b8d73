"""What the core knows: jobs, workers, nodes, changes of groups, and their transition tables."""

"""Training steps: batches, the reduction of gradients over the group, and the commit."""

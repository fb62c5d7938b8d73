"""Training steps: batches, gradients reduced over the group, commit."""

"""`ones sweep`: many configurations of one training."""

"""Process groups of one version each, and what rides beside the gradients in them."""

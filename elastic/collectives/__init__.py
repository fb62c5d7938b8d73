"""Process groups, each of one version, and the control words reduced with the gradients."""

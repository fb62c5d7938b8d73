"""Process groups of one version each, and the control words reduced with the gradients."""

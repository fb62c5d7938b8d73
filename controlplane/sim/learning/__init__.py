"""Training of learned policies: the only room of the control plane that imports torch."""

"""Training of learned policies; the only folder of the control plane that imports torch."""

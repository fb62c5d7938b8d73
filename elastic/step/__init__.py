"""One training step: what is loaded, summed over the group, and committed."""

"""Sweeps as users define, follow and change them."""

"""Sweeps as users state, follow and change them."""

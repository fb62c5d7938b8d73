"""Sweeps as their users state, follow and change them."""

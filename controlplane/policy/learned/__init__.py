"""Policies that decide with trained networks, and the files of their models."""

"""Autoscaler: requests machines from another engine, and returns them."""

"""Requests of clients: to inputs of the core, and its state to replies."""

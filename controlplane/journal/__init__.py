"""Durable history of the core: every input with its time, and the resulting feed events."""

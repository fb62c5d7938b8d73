"""Durable history: every input of the core with its time, and the feed events that resulted."""

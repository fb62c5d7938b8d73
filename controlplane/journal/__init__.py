"""Durable history: every input of the core with its time, and the feed that came of it."""

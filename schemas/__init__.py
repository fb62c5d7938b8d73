"""Definitions that both ends of each wire share."""

__version__ = "0.1.0"  # of the release, all packages; `pyproject.toml` reads it here

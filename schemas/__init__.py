"""Definitions that both ends of each wire share."""

__version__ = "0.2.0"  # of the release, all packages; `pyproject.toml` reads it here

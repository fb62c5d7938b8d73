"""Definitions that both ends of each wire share."""

__version__ = "0.2.0"  # release of all packages; `pyproject.toml` reads it here

"""What must agree on both ends of every wire."""

__version__ = "0.2.0"  # of the release, all packages; `pyproject.toml` reads it here

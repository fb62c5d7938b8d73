"""Chance that depends on its key alone."""

from __future__ import annotations

from random import Random


def stream(*key: str | int) -> Random:
    """Draws that are the same for the same key, on every machine."""
    return Random("/".join(map(str, key)))  # noqa: S311 - nothing here is a secret

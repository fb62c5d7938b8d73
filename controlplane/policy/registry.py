"""Policy name to factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from controlplane.policy.api import Policy
from controlplane.policy.fifo import Fifo
from schemas.errors import SettingsError

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"fifo": Fifo}


def make(name: str) -> Policy:
    """A new policy of that name.

    Raises:
        SettingsError: if there is none.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise SettingsError(
            f"unknown policy {name!r}", f"choose one of {known}", "policy"
        ) from None

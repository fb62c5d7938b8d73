"""How the rest of the library reports to the controller, without knowing how reports travel."""

from __future__ import annotations

from typing import Any, Protocol

from schemas.messages.agent import ScriptReport


class Report(Protocol):
    """Reports something that nothing may lose."""

    def __call__(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Report.

        Args:
            fields: its own; job, version, rank and index are added.
        """
        ...

"""rich's console, with the texts of what it draws made harmless."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from controlplane.cli.terminal import harmless


class HarmlessConsole(Console):
    """Draws as rich does; control codes are rich's own."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = [one if one.control else Segment(harmless(one.text), one.style) for one in buffer]
        return super()._render_buffer(safe)

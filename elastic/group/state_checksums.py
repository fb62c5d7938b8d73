"""In which steps the workers compare checksums of their states, and what came of it."""

from __future__ import annotations

from typing import Final

CHECK_AFTER: Final = 2  # steps behind a transfer or a recovery
CHECK_EVERY: Final = 256  # steps: against scripts that let workers drift apart


class StateCheck:
    """Decides by step numbers alone, so all workers decide alike."""

    def __init__(self) -> None:
        self.differs = False  # the states are not equal: rank 0's is to be sent to all
        self._at = 0  # step; 0: none

    def schedule(self, step: int) -> None:
        """Compare some steps behind `step`, in which the last change comes to its end.

        Args:
            step: 1-based; a check that was scheduled before is forgotten.
        """
        self._at = step + CHECK_AFTER

    def is_due(self, step: int, *, transferring: bool, rates_may_differ: bool) -> bool:
        """Whether checksums ride in the reduction of `step`.

        Args:
            transferring: some members have not the whole state yet.
            rates_may_differ: the scripts have just chosen rates by numbers of their own.
        """
        return step == self._at or (
            not transferring and (rates_may_differ or step % CHECK_EVERY == 0)
        )

    def passed(self, step: int) -> bool:
        """Whether `step` was the one that was scheduled; none is then.

        Args:
            step: that was reduced, 1-based.
        """
        if step != self._at:
            return False
        self._at = 0
        return True

    def reset(self) -> None:
        """The group broke: nothing is scheduled and nothing known."""
        self._at, self.differs = 0, False

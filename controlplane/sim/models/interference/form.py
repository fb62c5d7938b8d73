"""Which rule, as `--interference` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from controlplane.sim.simulator_errors import TraceError

Kind = Literal["none", "pollux", "pairwise", "class", "resources", "gavel"]
KINDS: Final = "none, pollux:SHARE, pairwise:SHARE, class:SHARE, resources:SHARE or gavel:FILE"


@dataclass(frozen=True, slots=True)
class Form:
    """A rule, with its mean slow-down or its file."""

    kind: Kind
    share: float = 0.0  # in [0, 1): of the speed that is lost, on average or always
    file: str = ""


def parse_interference(text: str) -> Form:
    """`none`, a kind with a share as in `pairwise:0.25`, or `gavel:FILE`.

    A share of 0 is `none`.

    Args:
        text: as an option of a command has it.

    Raises:
        TraceError: if it is none of these.
    """
    kind, _, rest = text.partition(":")
    if kind == "gavel" and rest:
        return Form("gavel", file=rest)
    try:
        share = float(rest) if rest else 0.0
    except ValueError:
        share = -1.0
    if kind == "gavel" or kind not in get_args(Kind) or not 0.0 <= share < 1.0:
        hint = "with 0 <= SHARE < 1"
        raise TraceError(f"interference {text!r} is not one of {KINDS}", hint, "interference")
    return Form(cast("Kind", kind), share) if share else Form("none")

"""Options that every command takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter

from controlplane.cli.terminal import harmless
from controlplane.client import BlockingClient
from schemas.errors import OnesError

COMPLETE_S: Final = 2.0  # a shell waits no longer for names

Format = Literal["table", "json", "jsonl", "quiet"]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """What every command takes."""

    home: Annotated[Path | None, Parameter(help="folder of the cluster; default: $ONES_HOME")] = (
        None
    )
    output: Annotated[Format, Parameter(name=["--output", "-o"], help="how to print")] = "table"


COMMON: Final = Common()  # as the default of a command's argument


def _job_names(context: Any) -> Sequence[str]:
    """Return the names of jobs that begin as the word does: of live ones, else of ended ones."""
    try:
        with BlockingClient(_home(context), COMPLETE_S) as client:
            for ended in (False, True):
                names = [harmless(job.job) for job in client.jobs(ended=ended)]
                if found := [name for name in names if name.startswith(context.incomplete)]:
                    return found
    except OnesError:  # completion cannot show errors
        pass
    return ()


def _node_names(context: Any) -> Sequence[str]:
    try:
        with BlockingClient(_home(context), COMPLETE_S) as client:
            return [harmless(node.node) for node in client.nodes()]
    except OnesError:
        return ()


def _home(context: Any) -> Path | None:
    given = context.get("--home")
    return given.value if given is not None and given.provided else None


JobName = Annotated[str, Parameter(completer=_job_names)]
NodeName = Annotated[str, Parameter(completer=_node_names)]

"""`ones config check`: a settings file checked by its daemon's rules on this host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

from controlplane.cli.output import COMMON, Common, Exit, print_data
from controlplane.service import settings_check as of_controller
from controlplane.service.settings import ControllerSettings
from nodeagent import settings_check as of_agent
from nodeagent.settings import AgentSettings
from schemas.errors import SettingsError
from schemas.host.settings import read_toml
from schemas.jobs import JobSpec

ARTICLES: Final = {"controller": "a", "agent": "an"}
Kind = Literal["controller", "agent"]
CHECKS: Final[Mapping[str, tuple[Any, Callable[[Path], list[SettingsError]]]]] = {
    "controller": (ControllerSettings, of_controller.check),
    "agent": (AgentSettings, of_agent.check),
}


def check(
    file: Annotated[Path, Parameter(help="settings file of a controller or an agent")],
    *,
    kind: Annotated[
        Kind | None, Parameter(help="daemon of the file (default: guessed from its keys)")
    ] = None,
    common: Common = COMMON,
) -> int:
    """Print every problem of a settings file on this host; exit code 2 if there are any."""
    path = file.expanduser().resolve()
    daemon = kind or _kind_of(path)
    problems = CHECKS[daemon][1](path)
    if common.output in {"json", "jsonl"}:
        rows = [{"field": p.field, "problem": p.message, "remedy": p.hint} for p in problems]
        print_data({"file": str(path), "kind": daemon, "problems": rows}, common.output)
    else:
        for problem in problems:
            what = str(problem).removeprefix(f"{path}: ")
            sys.stdout.write(f"{path}: {what}\n")
        if not problems and common.output != "quiet":
            sys.stdout.write(f"{path}: valid settings of {ARTICLES[daemon]} {daemon}\n")
    return Exit.USAGE if problems else Exit.OK


def _kind_of(path: Path) -> str:
    table = read_toml(path)

    def known(kind: str) -> int:
        fields = {field.name for field in msgspec.structs.fields(CHECKS[kind][0])}
        return len(fields & table.keys())

    stated = len({field.name for field in msgspec.structs.fields(JobSpec)} & table.keys())
    best = max(CHECKS, key=known)
    if stated > known(best):
        remedy = f"`ones submit {path} --dry-run` checks it"
        raise SettingsError(f"{path} is a job file, not a daemon's settings", remedy, "file")
    return best

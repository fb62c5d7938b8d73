"""Options that every command takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

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

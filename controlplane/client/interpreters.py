"""Modules run in another interpreter on this host, which has torch and the library."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from schemas.errors import BadFieldError, OnesError

EXPORT_TIMEOUT_S: Final = 600.0


class NoTorchError(OnesError):
    """Raised if no interpreter on this host has torch and this library."""

    code = "no_torch"


def run_module(
    pythons: Sequence[str],
    command: Sequence[str],
    *,
    lacks: Sequence[str],
    failure: str,
    field: str,
    **options: Any,
) -> str:
    """Run `python -P -m COMMAND` with the first interpreter that has torch; return its output.

    Args:
        lacks: texts in the last line of the error output of an interpreter without torch.
        failure: problem that the error names if the module fails.
        options: further options of `subprocess.run`.

    Raises:
        BadFieldError: if the module fails; the error ends with the last line of its error output.
        NoTorchError: if no interpreter has torch and this library.
    """
    for python in pythons:
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(  # noqa: S603 - a user names it
                [python, "-P", "-m", *command],
                capture_output=True,
                text=True,
                check=False,
                **options,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        if not any(text in said for text in lacks):
            raise BadFieldError(f"{failure}: {said}", "", field)
    hint = "name an interpreter that has torch and this library with --python"
    raise NoTorchError(f"no torch in {' or '.join(pythons)}", hint, "python")


def convert_state(source: Path, target: Path, pythons: Sequence[str]) -> None:
    """Write the model of a state or checkpoint to `target`; replace an existing file."""
    run_module(
        pythons,
        ("elastic.export_state", str(source), str(target)),
        lacks=("ModuleNotFoundError",),
        failure="the checkpoint cannot be exported",
        field="job",
        timeout=EXPORT_TIMEOUT_S,
    )

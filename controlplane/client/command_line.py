"""Jobs from command lines: a program, a shell command, or a line of torchrun."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NoReturn

from schemas.errors import BadFieldError

NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")
MAX_NAME: Final = 48
DEFAULT_SHELL: Final = "command -v bash >/dev/null && exec bash; exec sh"
TORCHRUN: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
WITH_VALUE: Final = (  # options of torchrun that the cluster decides
    "--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint",
    "--rdzv-id", "--rdzv-conf", "--local-addr", "--monitor-interval", "--start-method", "--role",
    "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
)  # fmt: skip
WITHOUT_VALUE: Final = ("--standalone", "--use-env")


def job_of_command(argv: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the fields of the job that a command line describes, and a remark for its user.

    A line of torchrun becomes a `torchrun` job with its number of processes. What torchrun would do
    for the rendezvous is left out, because the cluster does it. Any other line is a `command`.

    Raises:
        BadFieldError: if there is no command, or if torchrun's options are invalid.
    """
    if not argv or not argv[0]:
        remedy = "write it after --, as in `ones run -- python train.py`"
        raise BadFieldError("command: is missing", remedy, "command")
    if (rest := _after_torchrun(argv)) is not None:
        return _torchrun(rest)
    return {"name": _name(argv), "kind": "command", "command": list(argv)}, ""


def job_on_terminal(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an interactive job with this program (default: bash, or sh).

    The program gets the names of terminal and language of the client's environment.
    """
    program = list(argv) or shell_command(DEFAULT_SHELL)
    env = {name: environ[name] for name in ("TERM", "LANG") if environ.get(name)}
    name = _name(argv) if argv else "shell"
    return {"name": name, "kind": "interactive", "command": program, "env": env}


def shell_command(text: str) -> list[str]:
    """Return the arguments that let a shell run a text."""
    return ["/bin/sh", "-c", text]


def _after_torchrun(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments of torchrun, or None if the line does not start it."""
    first = PurePath(argv[0]).name
    if first == TORCHRUN[0]:
        return list(argv[1:])
    if re.fullmatch(r"python[\d.]*", first) and argv[1:2] == ["-m"] and argv[2:3]:
        return list(argv[3:]) if argv[2] in TORCHRUN else None
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        remedy = "correct the line; `torchrun --help` lists its options"
        raise BadFieldError(f"command: torchrun: {message}", remedy, "command")


def _torchrun(argv: list[str]) -> tuple[dict[str, Any], str]:
    parser = _Parser(prog="torchrun", add_help=False, allow_abbrev=False)

    def option(name: str, **how: Any) -> None:
        parser.add_argument(name, *{name.replace("-", "_").replace("__", "--", 1)} - {name}, **how)

    option("--nnodes", default="1")
    option("--nproc-per-node", default="1")
    option("--max-restarts", type=int, default=0)
    for name in WITH_VALUE:
        option(name)
    for name in WITHOUT_VALUE:
        option(name, action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    option("--no-python", action="store_true")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    script, python = [given.script, *given.rest], ["python", "-u"]
    if given.no_python:
        python = []
    elif given.module:
        python.append("-m")
    fields = {
        "name": _name([given.script]),
        "kind": "torchrun",
        "command": [*python, *script],
        "slots": _number(given.nnodes, "--nnodes")
        * _number(given.nproc_per_node, "--nproc-per-node"),
        "retries": given.max_restarts,
    }
    names = {name.replace("-", "_").lstrip("_"): name for name in (*WITH_VALUE, *WITHOUT_VALUE)}
    dropped = [name for field, name in names.items() if getattr(given, field)]
    remark = f"{', '.join(dropped)}: left out, because the cluster decides it" if dropped else ""
    return fields, remark


def _number(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        what = f"command: torchrun {option}={text} is not a number of 1 or more"
        remedy = "give a fixed number; an elastic job has a range of slots (`ones init`)"
        raise BadFieldError(what, remedy, "command")
    return int(text)


def _name(argv: Sequence[str]) -> str:
    """Return a job name made of the program, or of the script that an interpreter runs."""
    words = [word for word in argv if not word.startswith("-")]
    interpreter = re.fullmatch(r"(python|bash|sh)[\d.]*", PurePath(argv[0]).name)
    word = words[1] if interpreter and len(words) > 1 else argv[0]
    stem = PurePath(word.split()[0] if word.split() else word).stem
    return NOT_IN_NAMES.sub("-", stem).strip("-_")[:MAX_NAME] or "command"

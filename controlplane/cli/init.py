"""`ones init`: write a commented job file for a script, and propose changes to the script."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from controlplane.cli.init_script.port_script import Port, changed_lines, port
from controlplane.cli.init_script.script_facts import Facts, look
from controlplane.cli.init_script.syntax import Source
from controlplane.cli.output import COMMON, Common
from controlplane.client.files import replacement
from schemas.errors import BadFieldError
from schemas.jobs import NAME

COMMON_NAMES: Final = frozenset({"train", "main", "run", "job", "script"})
DEFAULT_BATCH: Final = 32
MAX_SLOTS: Final = 4  # the most slots that the job file requests
MAX_SHOWN_OPTIONS: Final = 4  # options of the script that the comment on `args` lists


def job_name(script: Path) -> str:
    """Return a job name: that of the script, or of its folder if the script's name is common."""
    stem = script.parent.name if script.stem.lower() in COMMON_NAMES else script.stem
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40]
    return name if NAME.fullmatch(name) else "job"


def job_file(facts: Facts, script: Path, relative: str) -> str:
    """Return the text of a valid job file, with a comment on every choice.

    `relative` is the path of the script relative to the folder of the job file.
    """
    batch = facts.batch_size or DEFAULT_BATCH
    where = "the script's" if facts.batch_size else "not found in the script: set it"
    lines = [
        "# Made by `ones init`; every key is described in docs/reference/job-file.md.",
        f"name = {json.dumps(job_name(script))}",
        f"script = {json.dumps(relative)}  # run in a snapshot of this folder",
        *_arguments(facts),
        "",
        f"batch_size = {batch}  # {where}; global, samples per step, at the start",
        '# max_batch_size = "keep"  # no larger batch; default: as data, memory and noise allow',
        f"# max_local_batch = {batch}  # the most samples that fit the memory of one slot",
        *_rate(facts),
        f"slots = [1, {MAX_SLOTS}]  # least, most",
        "",
        *_stop(facts),
        "# retries = 1  # default 0: a script that fails is not run again; lost nodes do not count",
        '# on_loss = "fail"  # default: go on from the last checkpoint when a node is lost',
        '# python = ".venv/bin/python"  # interpreter with torch; default: the agent\'s',
        "# [env]",
        '# OMP_NUM_THREADS = "1"',
    ]
    return "\n".join(lines) + "\n"


def _arguments(facts: Facts) -> list[str]:
    if not facts.options:
        return []
    shown = list(facts.options.items())[:MAX_SHOWN_OPTIONS]
    text = ", ".join(f"{name} {value}" for name, value in shown if value is not None)
    more = ", ..." if len(facts.options) > MAX_SHOWN_OPTIONS else ""
    return [f"# args = []  # its options and defaults: {text}{more}" if text else "# args = []"]


def _rate(facts: Facts) -> list[str]:
    if facts.lr is None:
        return ["# lr = 0.1  # at batch_size; default: the script's own"]
    return [f"lr = {facts.lr!r}  # the script's, at batch_size; scaled when the batch changes"]


def _stop(facts: Facts) -> list[str]:
    """Return the line of `stop`, below a hint if the script would report no metric for it.

    The library reports the training loss of each epoch by itself, so no line of the script has to.
    """
    metric = facts.metric or "accuracy"
    lines = []
    if not facts.metric and facts.framework is None:
        name = facts.agent
        lines.append(
            f"# the training loss is reported; `{name}.report(accuracy=...)` adds a metric"
        )
    other = f'{{ metric = "{metric}", plateau = 5 }}'
    if facts.epochs is not None:
        return [*lines, f"stop = {{ epochs = {facts.epochs} }}  # the script's; or {other}"]
    if facts.steps and facts.batch_size:
        samples = facts.steps * facts.batch_size
        return [*lines, f"stop = {{ samples = {samples} }}  # {facts.steps} steps; or {other}"]
    return [*lines, f"# stop = {{ epochs = 10 }}  # default: the script's own epochs; or {other}"]


NAMED = ("batch_size", "lr", "epochs")


def init(
    script: Path,
    /,
    *,
    to: Annotated[
        Path | None, Parameter(help="job file to write (default: job.toml beside SCRIPT)")
    ] = None,
    apply: Annotated[bool, Parameter(help="apply the changes to the script")] = False,
    force: Annotated[bool, Parameter(help="replace an existing job file")] = False,
    common: Common = COMMON,
) -> None:
    """Write a job file for SCRIPT, and show the changes that make the script use the library."""
    source = _read(script)
    target = to or script.parent / "job.toml"
    keeps = target.exists() and not force
    if keeps and not apply:
        hint = "--force replaces it, --to FILE writes another"
        raise BadFieldError(f"{target} exists already", hint, "to")
    facts = look(source)
    if facts.ported and target.exists() and not keeps:
        problem = f"{script} already uses the library, so its numbers cannot be read"
        raise BadFieldError(problem, f"edit {target}, or write another with --to FILE", "force")
    if common.output == "table":
        _ask(facts)
    ported = port(facts, script.name)
    relative = os.path.relpath(script.resolve(), target.resolve().parent)
    if relative.startswith(".."):
        hint = "choose a file with --to in the script's folder or in one above it"
        raise BadFieldError(f"{script} is outside the folder of {target}", hint, "to")
    if not keeps:
        _write(target, job_file(facts, script.resolve(), relative))
    if apply and ported.text:
        _write(script, ported.text)
    row = _row(facts, ported, source, script)
    row |= {"job_file": str(target), "applied": apply and bool(ported.text)}
    if common.in_json:
        sys.stdout.write(json.dumps(row) + "\n")
    elif common.output == "table":
        _say(row, script, "kept" if keeps else "wrote")


def _read(script: Path) -> Source:
    try:
        return Source(script.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadFieldError(f"{script}: {error.strerror}", "check the path", "script") from None
    except (SyntaxError, ValueError) as error:
        problem = f"{script} is not valid Python: {error}"
        raise BadFieldError(problem, "correct the script first", "script") from None


def _write(path: Path, text: str) -> None:
    with replacement(path, "choose another with --to", "to") as fresh:
        fresh.write_text(text, encoding="utf-8")
        if path.exists():
            fresh.chmod(path.stat().st_mode & 0o777)


def _ask(facts: Facts) -> None:
    """Ask the user for numbers that the script does not contain; do nothing without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if facts.batch_size is None:
        answer = _answer("global batch size, samples per step")
        facts.batch_size = int(answer) if answer and answer >= 1 else None
    if facts.epochs is None:
        answer = _answer("epochs (empty: the script's own)")
        facts.epochs = int(answer) if answer and answer >= 1 else None
    if facts.lr is None:
        facts.lr = _answer("learning rate at that batch (empty: the script's own)")


def _answer(question: str) -> float | None:
    while True:
        sys.stderr.write(f"{question}? ")
        sys.stderr.flush()
        text = sys.stdin.readline().strip()
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            sys.stderr.write("enter a number; ")


def _row(facts: Facts, ported: Port, source: Source, script: Path) -> dict[str, Any]:
    diff = ported.diff(source.text, script.name)
    return {
        "found": {name: getattr(facts, name) for name in NAMED},
        "lines": changed_lines(diff),
        "diff": diff,
        "missing": ported.missing,
        "refused": ported.refused,
        "advice": ported.advice,
        "ready": not ported.refused and (bool(ported.text) or facts.ported),
    }


def _say(row: dict[str, Any], script: Path, done: str) -> None:
    out = sys.stdout.write
    found = ", ".join(
        f"{name} {'not found' if value is None else f'{value:g}'}"
        for name, value in row["found"].items()
    )
    out(f"{done} {row['job_file']} ({found})\n")
    for line in row["missing"]:
        out(f"{script.name}: {line}\n")
    if row["diff"]:
        lines = f"{row['lines']} line{'s' * (row['lines'] != 1)} of {script}"
        out(f"{'changed' if row['applied'] else 'to change:'} {lines}\n\n{row['diff']}\n")
        if not row["applied"]:
            out(f"`ones init {script} --apply` makes these changes\n")
    for line in (*row["refused"], *row["advice"]):
        out(f"{script.name}: {line}\n")
    first = "first make the changes above, " if not row["ready"] else ""
    out(f"{first}then: ones submit {row['job_file']}\n")

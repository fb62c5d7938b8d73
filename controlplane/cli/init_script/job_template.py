"""The commented job file that `ones init` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from controlplane.cli.init_script.script_facts import Facts
from schemas.jobs import NAME

COMMON_NAMES: Final = frozenset({"train", "main", "run", "job", "script"})
GUESSED_BATCH: Final = 32
GROWTH: Final = 4  # the most slots that the job file asks for
SHOWN: Final = 4  # options of the script in the comment on `args`


def job_name(script: Path) -> str:
    """Return a job name: the script's, or its folder's if the script's is a common one.

    Args:
        script: absolute.
    """
    stem = script.parent.name if script.stem.lower() in COMMON_NAMES else script.stem
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40]
    return name if NAME.fullmatch(name) else "job"


def job_file(facts: Facts, script: Path, relative: str) -> str:
    """The text of a job file that can be submitted, with a comment on every choice.

    Args:
        facts: of the script, with the numbers that the user was asked for.
        script: absolute.
        relative: path of the script from the job file's folder.
    """
    batch = facts.batch_size or GUESSED_BATCH
    where = "the script's" if facts.batch_size else "not found in the script: set it"
    lines = [
        "# Made by `ones init`; every key is described in docs/jobs.md.",
        f"name = {json.dumps(job_name(script))}",
        f"script = {json.dumps(relative)}  # run in a snapshot of this folder",
        *_arguments(facts),
        "",
        f"batch_size = {batch}  # {where}; global, samples per step, at the start",
        '# max_batch_size = "keep"  # default: data, memory and gradient noise limit it',
        f"# max_local_batch = {batch}  # the most samples that fit the memory of one slot",
        *_rate(facts),
        f"slots = [1, {GROWTH}]  # least, most",
        "",
        *_stop(facts),
        "retries = 1  # after a failure, from the last finished epoch",
        '# on_loss = "fail"  # default: restart from there when a node is lost',
        '# python = ".venv/bin/python"  # interpreter with torch; default: the agent\'s',
        "# [env]",
        '# OMP_NUM_THREADS = "1"',
    ]
    return "\n".join(lines) + "\n"


def _arguments(facts: Facts) -> list[str]:
    if not facts.options:
        return []
    shown = list(facts.options.items())[:SHOWN]
    text = ", ".join(f"{name} {value}" for name, value in shown if value is not None)
    more = ", ..." if len(facts.options) > SHOWN else ""
    return [f"# args = []  # its options and defaults: {text}{more}" if text else "# args = []"]


def _rate(facts: Facts) -> list[str]:
    if facts.lr is None:
        return ["# lr = 0.1  # at batch_size; default: the script's own"]
    return [f"lr = {facts.lr!r}  # the script's, at batch_size; scaled when the batch changes"]


def _stop(facts: Facts) -> list[str]:
    metric = facts.metric or "accuracy"
    other = f'{{ metric = "{metric}", plateau = 5 }}'
    if facts.epochs is None and facts.steps and facts.batch_size:
        samples = facts.steps * facts.batch_size
        return [f"stop = {{ samples = {samples} }}  # {facts.steps} steps; or {other}"]
    if facts.epochs is None:
        return [f"# stop = {{ epochs = 10 }}  # default: the script's own epochs; or {other}"]
    return [f"stop = {{ epochs = {facts.epochs} }}  # the script's; or {other}"]

"""A job file with comments, from what a script says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from controlplane.cli.init_script.script_facts import Facts
from schemas.jobs import NAME

COMMON_NAMES: Final = frozenset({"train", "main", "run", "job", "script"})
GUESSED_BATCH: Final = 32
GROWTH: Final = 4  # what a job may grow to unless its owner says otherwise: slots, and batches
SHOWN: Final = 4  # options of the script


def job_name(script: Path) -> str:
    """A name for the jobs of a script: its own, or its folder's if its own says nothing.

    Args:
        script: absolute.
    """
    stem = script.parent.name if script.stem.lower() in COMMON_NAMES else script.stem
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:40]
    return name if NAME.fullmatch(name) else "job"


def job_file(facts: Facts, script: Path, relative: str) -> str:
    """The text of a job file that can be submitted, with a comment on every choice.

    Args:
        facts: what the script says; its numbers may have been asked for.
        script: absolute.
        relative: the script as seen from the job file's folder.
    """
    batch = facts.batch_size or GUESSED_BATCH
    where = "the script's" if facts.batch_size else "the script does not say: set it"
    lines = [
        "# Made by `ones init`; every key is described in docs/jobs.md.",
        f"name = {json.dumps(job_name(script))}",
        f"script = {json.dumps(relative)}  # run in a snapshot of this folder",
        *_arguments(facts),
        "",
        f"batch_size = {batch}  # {where}; global, samples per step, to begin with",
        '# max_batch_size = "keep"  # left out: data, memory and noise say how far it may grow',
        f"# max_local_batch = {batch}  # the most that fits one slot's memory",
        *_rate(facts),
        f"slots = [1, {GROWTH}]  # least, most",
        "",
        *_stop(facts),
        "retries = 1  # of a script that fails, from its last finished epoch",
        '# on_loss = "fail"  # left out: it starts again from there when its node is lost',
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
    return [f"lr = {facts.lr!r}  # the script's, at batch_size; it follows the batch from there"]


def _stop(facts: Facts) -> list[str]:
    metric = facts.metric or "accuracy"
    other = f'{{ metric = "{metric}", plateau = 5 }}'
    if facts.epochs is None and facts.steps and facts.batch_size:
        samples = facts.steps * facts.batch_size
        return [f"stop = {{ samples = {samples} }}  # {facts.steps} steps; or {other}"]
    if facts.epochs is None:
        return [f"# stop = {{ epochs = 10 }}  # default: the script's own epochs; or {other}"]
    return [f"stop = {{ epochs = {facts.epochs} }}  # the script's; or {other}"]

"""submit --dry-run: what would go, and what would be said of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from controlplane.cli.common_options import Common
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import plain, print_json, print_line
from controlplane.cli.submission import Submission, library_note, on_screen, snapshot_line
from controlplane.client import BlockingClient, JobSpec
from controlplane.client.sweeps.sweep import in_words
from schemas.errors import BadFieldError, OnesError, SettingsError
from schemas.sweeps import SweepSpec

OF_NO_SWEEP: Final = frozenset({"script", "batch_size", "max_batch_size", "sweep"})
ASK_S: Final = 3.0  # a dry run waits so long for a controller


def say_dry(ready: Sequence[Submission], common: Common) -> int:
    """Say what would be submitted, and what the controller would say of it, where one answers."""
    notes, why_not = _notes(ready, common)
    rows = [_dry(one) | {"notes": said} for one, said in zip(ready, notes, strict=True)]
    if common.output == "json":
        print_json(rows[0] if len(rows) == 1 else rows)
        return Exit.OK
    for one, row in zip(ready, rows, strict=True):
        if common.output == "jsonl":
            print_line(row)
        elif common.output == "table":
            sys.stdout.write(f"{one.file} can be submitted\n")
            for name, value in _stated(one.spec).items():
                sys.stdout.write(f"  {name:15s} {value}\n")
            line = f"  {'snapshot':15s} {snapshot_line(one)}"
            sys.stdout.write(f"{on_screen(line, sys.stdout)}\n")
            for note in filter(None, (library_note(one), *(row["notes"] or ()))):
                sys.stdout.write(f"  {'note':15s} {note}\n")
    if why_not and common.output == "table":
        sys.stderr.write(f"no controller was asked: {why_not}\n")
    return Exit.OK


def _notes(
    ready: Sequence[Submission], common: Common
) -> tuple[list[tuple[str, ...] | None], OnesError | None]:
    """What the controller would say of each job; None, and perhaps why, where none can be asked.

    Raises:
        BadFieldError: if it would not accept one of them.
    """
    try:
        with BlockingClient(common.home, ASK_S) as client:
            return [None if one.stored else client.check(one.spec) for one in ready], None
    except BadFieldError:
        raise
    except SettingsError:  # nobody spoke of a cluster
        return [None] * len(ready), None
    except OnesError as error:
        return [None] * len(ready), error


def _dry(one: Submission) -> dict[str, Any]:
    """A job that can be submitted, for programs; `notes` is None if no controller was asked."""
    largest = [{"path": name, "bytes": size} for name, size in one.largest]
    snapshot = {"bytes": one.size, "files": len(one.travels), "largest": largest}
    return {"job": None, "state": "valid", "spec": one.spec, "snapshot": snapshot}


def _stated(spec: JobSpec) -> dict[str, str]:
    """The fields that are not as they would be without a word, and those that rule its size."""
    found = {}
    sweep = spec.stated_sweep
    for field in msgspec.structs.fields(spec):
        if sweep is not None and field.name in OF_NO_SWEEP:
            continue
        value = getattr(spec, field.name)
        if field.required or field.name == "slots" or value != field.default:
            found[field.name] = _text(plain(value))
    least, most = spec.slots
    found["slots"] = f"{least} to {most}"
    if sweep is not None:
        found |= _stated_search(sweep)
    return {name: text for name, text in found.items() if text}


def _stated_search(sweep: SweepSpec) -> dict[str, str]:
    search = sweep.search
    options = plain(search.searcher)
    kind = options.pop("type")
    chosen = ", ".join(f"{name}={value}" for name, value in options.items())
    names = ("input_fn", "model_fn", "train_fn", "eval_fn")
    return {
        "functions": " ".join(path for name in names if (path := getattr(sweep, name))),
        "searcher": f"{kind} {chosen}".strip(),
        "epochs": f"at most {search.epochs} each",
        "metric": f"{search.mode} of {search.metric}",
        "partitions": str(sweep.partitions),
        **{f"space.{name}": in_words(one) for name, one in search.space.items()},
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

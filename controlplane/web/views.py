"""Parts of the pages, made from the state of the cluster.

A page is a set of parts, each with an id of its own. An open page receives the parts that differ
from those it shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from controlplane.client.formats import HOUR_S, byte_count, second, span
from controlplane.web.mirror import JobState, State
from schemas.jobs import ENDED
from schemas.wire.client import JobUsage, SweepDetail

FOLDER: Final = Path(__file__).parent
MAX_VIEWS: Final = 100  # whose messages are kept
MAX_DECISIONS: Final = 200  # latest ones of a job that are shown
MAX_STOPPED: Final = 20  # trials that a rung names
LONGEST: Final = 400  # characters of a text of a user


class Part(NamedTuple):
    """Part of a page."""

    parent: str  # id of the element that contains the part
    html: str


Parts = Mapping[str, Part]
NOTHING: Final[Parts] = {}


def environment() -> Environment:
    """Return the templates; every value in them is escaped."""
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "second": second, "span": span, "bytes": byte_count, "text": plain, "number": number,
    }  # fmt: skip
    return made


def plain(text: object) -> str:
    """Return foreign text for a page: no control or direction characters, and not too long."""
    shown = "".join(char if char.isprintable() else " " for char in str(text)[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with so many significant digits; None is an empty text."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


class Views:
    """Makes the parts of each page."""

    def __init__(self, templates: Environment, base: str) -> None:
        self._parts: Any = templates.get_template("parts.html").make_module({"base": base})

    def common(self, state: State) -> dict[str, Part]:
        """Return the parts of every page."""
        return {"status": Part("banner", self._parts.status(state))}

    def now(self, state: State) -> Parts:
        """Return the parts of the first page."""
        parts = self.common(state)
        parts["summary"] = Part("summary-of-cluster", self._parts.summary(state, _counts(state)))
        for job in state.jobs:
            where = "ended" if job.state in ENDED else "running" if job.slots else "queue"
            row = getattr(self._parts, f"{where}_row")
            parts[f"{where}-{job.job}"] = Part(where, row(job))
        if state.sharing is not None:
            projects = state.sharing.sharing.projects
            for account in state.sharing.accounts:
                name = f"account-{account.project}-{account.user}"
                row = self._parts.account_row(account, projects.get(account.project))
                parts[name] = Part("accounts", row)
        return parts

    def job(self, state: State, job: JobState) -> Parts:
        """Return the parts of the page of a job."""
        parts = self.common(state)
        parts["head"] = Part("job-head", self._parts.job_head(job.detail))
        parts["facts"] = Part("job-facts", self._parts.job_facts(job.detail))
        for worker in job.detail.workers:
            name = f"worker-{worker.worker or worker.rank}"
            parts[name] = Part("workers", self._parts.worker_row(worker))
        decisions = list(enumerate(job.explanation.decisions))
        for index, decision in reversed(decisions[-MAX_DECISIONS:]):
            row = self._parts.decision_row(decision, _gain(decision.numbers), index)
            parts[f"decision-{index}"] = Part("decisions", row)
        return parts

    def nodes(self, state: State) -> Parts:
        """Return the parts of the page of nodes."""
        parts = self.common(state)
        for node in state.nodes:
            parts[f"node-{node.node}"] = Part("nodes", self._parts.node_row(node))
        return parts

    def scheduler(self, state: State) -> Parts:
        """Return the parts of the page of the scheduler."""
        parts = self.common(state)
        if state.search is not None:
            parts["search"] = Part("search-facts", self._parts.search_facts(state.search))
            jobs = {job.job: job for job in state.jobs}
            for planned in state.search.planned:
                row = self._parts.planned_row(planned, jobs.get(planned.job))
                parts[f"planned-{planned.job}"] = Part("planned", row)
        return parts

    def sweeps(self, state: State) -> Parts:
        """Return the parts of the list of sweeps."""
        parts = self.common(state)
        for job in state.jobs:
            if job.kind == "sweep":
                parts[f"sweep-{job.job}"] = Part("sweeps", self._parts.sweep_row(job))
        return parts

    def sweep(self, state: State, detail: SweepDetail) -> Parts:
        """Return the parts of the page of a sweep."""
        parts = self.common(state)
        parts["head"] = Part("sweep-head", self._parts.sweep_head(detail))
        for level, *row in rungs_of(detail):
            parts[f"rung-{level}"] = Part("rungs", self._parts.rung_row(level, *row))
        for trial in detail.trials:
            row = self._parts.trial_row(trial, detail.best == trial.number)
            parts[f"trial-{trial.number}"] = Part("trials", row)
        return parts

    def compared_rows(self, series: Mapping[str, Sequence[float]]) -> Markup:
        """Return a row of statistics for each series of completion times (s)."""
        return Markup("").join(
            self._parts.compared_row(
                name, len(times), sum(times) / len(times), *quantiles_of(times)
            )
            for name, times in series.items()
        )

    def usage_rows(self, jobs: Iterable[JobUsage]) -> Markup:
        """Return a row for each user of each project, largest first."""
        used: dict[tuple[str, str], list[float]] = {}
        for job in jobs:
            used.setdefault((job.project, job.user), []).append(job.slot_s)
        whole = sum(map(sum, used.values())) or 1.0
        rows = sorted(used.items(), key=lambda item: -sum(item[1]))
        return Markup("").join(
            self._parts.usage_row(*account, len(each), sum(each) / HOUR_S, sum(each) / whole)
            for account, each in rows
        )


class News:
    """Messages with the parts that changed, which all open pages of a view share."""

    def __init__(self) -> None:
        self._parts: dict[object, tuple[int, Parts]] = {}
        self._messages: dict[object, tuple[Parts, Parts, bytes]] = {}

    async def parts(
        self, view: object, state: State, make: Callable[[State], Awaitable[Parts]]
    ) -> Parts:
        """Return the parts of a view, made once for each state."""
        version, parts = self._parts.get(view, (None, NOTHING))
        if version != state.version:
            made = await make(state)
            parts = parts if made == parts else made
            if len(self._parts) >= MAX_VIEWS:
                self._parts.clear()
                self._messages.clear()
            self._parts[view] = state.version, parts
        return parts

    def message(self, view: object, state: State, old: Parts, new: Parts) -> bytes:
        """Return an event of a stream: the time, and what differs. `whole`: other rows are gone."""
        whole = old is NOTHING
        known = self._messages.get((view, whole))
        if known is None or known[0] is not old or known[1] is not new:
            said = {"whole": whole, "parts": differences(old, new)}
            known = self._messages[view, whole] = old, new, json.dumps(said)[1:].encode()
        return b'data: {"history": %d, "now": %.3f, %b\n\n' % (
            state.history, state.now(), known[2],
        )  # fmt: skip


def _counts(state: State) -> dict[str, int]:
    there = [node for node in state.nodes if node.state != "lost"]
    live = [job for job in state.jobs if job.state not in ENDED]
    slots, free = sum(node.slots for node in there), sum(node.free for node in there)
    running = sum(bool(job.slots) for job in live)
    return {
        "slots": slots, "used": slots - free, "running": running, "waiting": len(live) - running,
        "users": len({job.user for job in live}), "nodes": len(there),
    }  # fmt: skip


class Rung(NamedTuple):
    """Number of epochs after which the search compares trials."""

    epochs: int
    trials: int  # that may reach it
    done: int
    stopped: str  # numbers of the trials that ended here
    best: int | str  # number of the trial with the best value so far
    score: float | None


def has_rungs(detail: SweepDetail) -> bool:
    """Return whether the search compares trials at rungs."""
    return hasattr(detail.spec.search.searcher, "eta")


def rungs_of(detail: SweepDetail) -> list[Rung]:
    """Return the rungs that trials were granted, lowest first."""
    if not has_rungs(detail):
        return []
    search, found = detail.spec.search, []
    pick = max if search.mode == "max" else min
    for level in sorted({trial.granted for trial in detail.trials if trial.granted}):
        there = [trial for trial in detail.trials if trial.granted >= level]
        stopped = [t.number for t in there if t.granted == level and t.state == "stopped"]
        scores = [
            (values[search.metric], trial.number)
            for trial in there
            for values in trial.metrics[: max(0, level - trial.first_epoch + 1)]
            if math.isfinite(values.get(search.metric, math.nan))
        ]
        score, best = pick(scores, key=lambda one: one[0], default=(None, ""))
        done = sum(trial.epochs >= level for trial in there)
        named = ", ".join(map(str, stopped[:MAX_STOPPED]))
        more = f" and {len(stopped) - MAX_STOPPED} more" if len(stopped) > MAX_STOPPED else ""
        found.append(Rung(level, len(there), done, named + more, best, score))
    return found


def _gain(numbers: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the predicted and the realised speed-up of a decision; None if not known."""
    before, after = numbers.get("speed_now"), numbers.get("speed_then")
    realised = numbers.get("speed_realised")
    predicted = after / before if before and after else None
    return predicted, realised / before if before and realised else None


def quantiles_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the quantiles of 90% and 99%, of at least one value."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[last // 2], ordered[round(0.9 * last)], ordered[round(0.99 * last)]


def differences(old: Parts, new: Parts) -> list[tuple[str, str, str | None]]:
    """Return id, parent and HTML of each part that changed; HTML is None if the part is gone."""
    gone = [(name, part.parent, None) for name, part in old.items() if name not in new]
    changed = [
        (name, part.parent, part.html) for name, part in new.items() if old.get(name) != part
    ]
    return [*gone, *changed]

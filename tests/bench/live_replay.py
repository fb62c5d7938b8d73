"""What the simulator makes of the same jobs, from the journal that a live run left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.structs import fields, replace

from controlplane.sim.models.recording import (
    ChangeTimes,
    Recording,
    read_recording,
    write_recording,
)
from controlplane.sim.traces.journal_recording import recording_from_journal
from tests.bench import report
from tests.bench.live_cluster import JOURNAL
from tests.bench.live_jobs import SLOTS
from tests.support.cluster import Cluster

BEST_ORDER: Final = "srtf"  # fixed sizes in the best order that is known; needs an oracle
GENERATIONS: Final = 20  # of a search at each question; a live one has all the time in between
STANDS_S: Final = 0.3  # that nobody trains in a change of a group; journals do not tell


def replay(
    home: Path,
    others: Sequence[Path],
    policies: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Average completion times of the jobs in a cluster's journal under other policies, simulated.

    Speeds by size, lengths, arrivals and the time of starts are those that the journal has; how
    long changes take that this cluster never made, other clusters tell. Policies know the work
    that users stated, as they do live.

    Args:
        home: of a cluster that is down.
        others: clusters that changed jobs' sizes or stopped them.
        policies: to simulate.
        options: of these policies.

    Returns:
        Seconds by policy.
    """
    tool, file = Cluster(home, home), home / "jobs.rec"
    imported = tool.ones("sim", "import", str(home / JOURNAL), str(file), "--layout", "journal")
    assert imported.code == 0, imported.err
    recording = _with_changes(
        read_recording(file), [recording_from_journal(other / JOURNAL) for other in others]
    )
    write_recording(recording, file)
    start_s = recording.took.start_s or 0.0
    found = {}
    for policy in report.counted("simulated policy", policies, len(policies)):
        given = [
            word
            for name, value in options.get(policy, {}).items()
            for word in ("--option", f"{name}={json.dumps(value)}")
        ]
        simulated = tool.ones(
            "sim", "run", "--policy", policy, "--physics", "recorded", "--workload", str(file),
            "--nodes", "1", "--gpus-per-node", str(SLOTS), "--knowledge", "L3",
            "--stall", str(STANDS_S), "--first-stall", str(start_s),
            "--generations", str(GENERATIONS), "--think-every", "1", "-o", "json", *given,
        )  # fmt: skip
        assert simulated.code == 0, simulated.err
        found[policy] = float(simulated.json["avg_jct_s"])
    return found


def _with_changes(recording: Recording, others: Sequence[Recording]) -> Recording:
    """What `recording` does not tell of changes, from the median of the others."""
    told: dict[str, float] = {}
    for field in fields(ChangeTimes):
        known = [getattr(other.took, field.name) for other in others]
        seconds = [value for value in known if value is not None]
        if getattr(recording.took, field.name) is None and seconds:
            told[field.name] = median(seconds)
    return replace(recording, took=replace(recording.took, **told))

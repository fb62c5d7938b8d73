"""Sweep workers as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.host.state_files import find_state
from schemas.wire.agent import (
    SUSPEND,
    GroupFormed,
    ScriptFailed,
    SlotAwaited,
    Suspended,
    SweepWorkerReady,
    UnitEnded,
    UnitStarted,
    WorkerReady,
)
from schemas.wire.sweeps import StateRef
from tests.training.sweep_crew import FUNCTIONS, SweepCrew, alone

pytestmark = pytest.mark.slow
Crews = Callable[..., SweepCrew]


@pytest.fixture
def crews(tmp_path: Path) -> Iterator[Crews]:
    made: list[SweepCrew] = []

    def make(source: str = FUNCTIONS, **changes: Any) -> SweepCrew:
        made.append(SweepCrew(tmp_path, source, **changes))
        return made[-1]

    yield make
    for crew in made:
        crew.close()


def test_a_configuration_hops_over_nodes_and_deaths(crews: Crews) -> None:
    crew = crews()
    first, second, third = crew.start("a", "a", "b")
    visits = [(1, 2), (1, 0), (1, 3), (1, 1), (2, 0)]

    one = crew.ended(crew.unit(first, 1, visits[0]))
    two = crew.ended(crew.unit(third, 2, visits[1], one, [first]))  # from a's memory
    held = crew.hold(visits[2])
    lost = crew.unit(second, 3, visits[2], two, [third])
    crew.until(lambda: "train_fn 0 1 3" in crew.noted(), "it trains")
    crew.kill(second)
    held.unlink()
    three = crew.ended(crew.unit(first, 3, visits[2], two, [third]))
    crew.kill(third)
    four = crew.ended(crew.unit(first, 4, visits[3], three, evaluate=True))  # from its own
    (late,) = crew.join("a")
    five = crew.ended(crew.unit(late, 5, visits[4], four))  # from the node's file

    digests = [report.digest for report in (one, two, three, four, five)]
    assert digests == alone(crew.home, visits)
    assert four.scores.keys() == {"error"}
    assert five.metrics.keys() == {"loss"}
    assert not [r for r in crew.reported(UnitEnded) if r.attempt == lost.attempt]
    assert find_state(late.states, 0, 5, five.digest) == late.states / f"0-5-{five.attempt}.state"


def test_data_are_read_once_on_a_node(crews: Crews) -> None:
    crew = crews()
    first, second, other = crew.start("a", "a", "b")

    for trial, worker in enumerate((first, second, other)):
        crew.ended(crew.unit(worker, 1, (1, 2), trial=trial))

    assert crew.noted().count("input_fn 2") == 2
    assert {begun.samples for begun in crew.reported(UnitStarted)} == {24}


def test_a_leaver_ends_its_unit_first(crews: Crews) -> None:
    crew = crews()
    (first,) = crew.start("a")
    held = crew.hold((1, 0))
    unit = crew.unit(first, 1, (1, 0))
    crew.until(lambda: "train_fn 0 1 0" in crew.noted(), "it trains")

    (second,) = crew.join("a")
    crew.leave(first)
    crew.until(crew.formed, "the second goes on")
    assert first.alive
    held.unlink()
    ended = crew.ended(unit)
    crew.until(lambda: not first.alive, "it leaves")
    crew.leave(second, kind=SUSPEND)
    crew.until(lambda: not second.alive, "it leaves, too")

    assert first.process.exitcode == second.process.exitcode == 0
    assert ended.digest == alone(crew.home, [(1, 0)])[0]
    assert [report.group for report in first.reports if isinstance(report, GroupFormed)] == [1, 2]
    assert [(r.group, r.samples_done) for r in crew.reported(Suspended)] == [(4, 0)]


def test_rank_0_reports_the_speed_of_the_group(crews: Crews) -> None:
    crew = crews()
    first, second = crew.start("a", "a")
    crew.ended(crew.unit(second, 1, (1, 0)))
    crew.ended(crew.unit(first, 1, (1, 0), trial=1))
    crew.until(lambda: bool(crew.told), "it tells")

    told = crew.told[0]
    assert (told.rank, told.group, told.samples_done) == (0, 1, 24)
    assert told.samples_per_s > 0.0


@pytest.mark.parametrize("place", [-1, 600], ids=["a weight", "the header"])
def test_a_damaged_file_is_replaced_by_a_copy(crews: Crews, place: int) -> None:
    crew = crews()
    first, other = crew.start("a", "b")
    one = crew.ended(crew.unit(first, 1, (1, 0)))
    (late,) = crew.join("a")
    path = late.states / f"0-1-{one.attempt}.state"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)

    two = crew.ended(crew.unit(late, 2, (1, 1), one, [first]))

    assert two.digest == alone(crew.home, [(1, 0), (1, 1)])[1]
    assert not path.exists()
    assert other.alive


def test_a_missing_state_fails_one_unit_only(crews: Crews) -> None:
    crew = crews()
    (first,) = crew.start("a")
    gone = StateRef(trial=0, version=1, digest="00" * 32)

    failed = crew.failed(crew.unit(first, 2, (1, 1), gone))

    assert failed.fault == "state"
    assert failed.reason == (
        "state 1 of trial 0 is not available: no node is known to have it; the unit is trained again"
    )
    crew.ended(crew.unit(first, 1, (1, 0), trial=1))


@pytest.mark.parametrize(("line", "instead", "fault", "why"), [
    ('values["lr"]', 'values["rate"]', "trial", "model_fn raised KeyError: 'rate'; "),
    ("total = 0.0", "raise SystemExit(3)", "trial", "train_fn raised SystemExit: 3; "),
    ("total = 0.0", "raise MemoryError", "trial", "use a smaller batch or model"),
    ('{"loss": total / 3}', "[1]", "trial", "train_fn returned a list; return numbers by name"),
    ("torch.randn(24, 5,", "torch.randn(0, 5,", "data", "input_fn returned no data for partition 1"),
    ("x = torch.randn(", "x = torch.rand_(", "data", "input_fn raised AttributeError: "),
])  # fmt: skip
def test_a_failed_unit_reports_its_fault(
    crews: Crews, line: str, instead: str, fault: str, why: str
) -> None:
    crew = crews(FUNCTIONS.replace(line, instead))
    (first,) = crew.start("a")

    failed = crew.failed(crew.unit(first, 1, (1, 1)))

    assert failed.fault == fault
    assert why in failed.reason
    assert first.alive


def test_a_full_disk_delays_a_unit(crews: Crews) -> None:
    full = """
    import resource, threading
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    threading.Timer(0.7, resource.setrlimit, [resource.RLIMIT_FSIZE, (least, most)]).start()
"""
    source = FUNCTIONS.replace('    return {"loss"', full + '    return {"loss"')
    crew = crews(source)
    (first,) = crew.start("a")

    ended = crew.ended(crew.unit(first, 1, (1, 1)))

    assert find_state(first.states, 0, 1, ended.digest) is not None


def test_a_failed_import_names_field_and_remedy(crews: Crews) -> None:
    crew = crews(train_fn="units:train")

    with pytest.raises(AssertionError, match="UsageError"):
        crew.begin("a")

    (failed,) = crew.reported(ScriptFailed)
    assert failed.error == (
        "UsageError: train_fn = 'units:train': module units has no train; "
        "name a function at its top level"
    )


def test_a_worker_waits_for_its_slot(crews: Crews) -> None:
    crew = crews()

    (first,) = crew.begin("a", granted=False)

    assert [type(report) for report in first.reports] == [
        SlotAwaited,
        WorkerReady,
        SweepWorkerReady,
    ]

"""Results in a file: what is kept, what a crash leaves, what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from controlplane.sim.cluster import ResultsError
from controlplane.sim.experiment import append, load
from controlplane.sim.results import SlotAllocation
from schemas.ids import Seconds
from tests.support.sim_results import job_result, result, times

ONE = times("ones", 1.0, 2.0, seed=1)
TWO = result(
    job_result("a", 3.0, allocations=(SlotAllocation("n0/0", Seconds(0.0), Seconds(3.0)),)),
    seed=2,
    bound_s=1.5,
)


def test_results_come_back_as_they_were_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    assert [append(path, ONE), append(path, TWO)] == [True, True]

    assert load(path) == [ONE, TWO]


def test_no_file_is_no_results(tmp_path: Path) -> None:
    assert load(tmp_path / "results.jsonl") == []


def test_the_same_simulation_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, ONE)
    again = msgspec.structs.replace(ONE, wall_s=99.0)
    other = msgspec.structs.replace(ONE, options={"queues": 3})

    assert [append(path, again), append(path, other), append(path, other)] == [False, True, False]

    assert load(path) == [ONE, other]


def test_the_order_of_options_does_not_make_another_simulation(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, msgspec.structs.replace(ONE, options={"a": 1, "b": 2}))

    assert not append(path, msgspec.structs.replace(ONE, options={"b": 2, "a": 1}))


@pytest.mark.parametrize("kept", [1, 50, -1])
def test_a_torn_last_line_is_not_read_and_cut_off_by_the_next(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "results.jsonl"
    append(path, ONE)
    whole = path.read_bytes()
    append(path, TWO)
    torn = path.read_bytes()[len(whole) :][:kept]
    path.write_bytes(whole + torn)

    assert load(path) == [ONE]
    assert append(path, TWO)
    assert load(path) == [ONE, TWO]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b"nonsense\n", b"\n", b"[" * 10_000 + b"\n"])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "results.jsonl"
    append(path, ONE)
    path.write_bytes(path.read_bytes() + line)

    for read in (load, lambda path: append(path, TWO)):
        with pytest.raises(ResultsError, match=r"results\.jsonl:2: .*; delete the line"):
            read(path)


def test_a_disk_that_does_not_take_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="Is a directory; choose another file"):
        append(tmp_path, ONE)
    with pytest.raises(ResultsError, match="Is a directory; name a readable file"):
        load(tmp_path)


def test_several_may_append_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    seeds = [msgspec.structs.replace(ONE, seed=seed) for seed in range(10)]

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda each: append(path, each), seeds * 2))

    assert sum(written) == 10
    assert sorted(load(path), key=lambda each: each.seed) == seeds

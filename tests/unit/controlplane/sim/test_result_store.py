"""Results in a file: kept, torn by a crash, refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from controlplane.sim.cluster import ResultsError
from controlplane.sim.experiment import append, load
from controlplane.sim.results import SlotAllocation
from schemas.ids import Seconds
from tests.support.simulations import job_result, result, times

ONE = times("ones", 1.0, 2.0, seed=1)
TWO = result(
    job_result("a", 3.0, allocations=(SlotAllocation("n0/0", Seconds(0.0), Seconds(3.0)),)),
    seed=2,
    bound_s=1.5,
)


def test_results_come_back_as_they_were_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    assert load(path) == []
    assert [append(path, ONE), append(path, TWO)] == [True, True]
    assert load(path) == [ONE, TWO]


def test_a_simulation_is_appended_once_whatever_the_order_of_its_options(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, ONE)
    again = msgspec.structs.replace(ONE, wall_s=99.0)
    other, same = (
        msgspec.structs.replace(ONE, options=options)
        for options in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )

    assert [append(path, each) for each in (again, other, same)] == [False, True, False]
    assert load(path) == [ONE, other]


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
def test_an_invalid_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "results.jsonl"
    append(path, ONE)
    path.write_bytes(path.read_bytes() + line)

    for read in (load, lambda path: append(path, TWO)):
        with pytest.raises(ResultsError, match=r"results\.jsonl:2: .*; delete the line"):
            read(path)


def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="Is a directory; choose another file"):
        append(tmp_path, ONE)
    with pytest.raises(ResultsError, match="Is a directory; name a readable file"):
        load(tmp_path)


def test_threads_can_append_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    seeds = [msgspec.structs.replace(ONE, seed=seed) for seed in range(10)]

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda each: append(path, each), seeds * 2))

    assert sum(written) == 10
    assert sorted(load(path), key=lambda each: each.seed) == seeds

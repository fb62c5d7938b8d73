"""Many simulations in real processes, and their results in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.sim import experiment
from controlplane.sim.cluster import ResultsError
from controlplane.sim.experiment import (
    Cell,
    CellsFailedError,
    ExperimentProgress,
    StoppedError,
    append,
    bar,
    called,
    cell_key,
    grid,
    load,
    run,
)
from controlplane.sim.results import SimulationResult, SlotAllocation
from schemas.errors import SettingsError
from schemas.ids import Seconds
from tests.support.simulations import job_result, result, times

HERE = Path(__file__)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What the cells of these tests do."""

    folder: str  # where a cell leaves a file with its process's id
    does: str = "works"


def simulate(cell: Cell) -> SimulationResult:
    scenario: Scenario = cell.scenario
    Path(scenario.folder, f"{cell.policy}-{cell.seed}").write_text(str(os.getpid()))
    if cell.policy == "broken":
        match scenario.does:
            case "raises":
                raise ZeroDivisionError("there is no speed")
            case "refuses":
                raise SettingsError("unknown option", "leave it out")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exits":
                os._exit(7)
            case "exits in its policy":
                called(Seconds(12.0))
                os._exit(0)
            case "hangs in its policy":
                experiment.CALL_TIMEOUT_S = 0.1  # type: ignore[misc] # of this process
                called(Seconds(12.0))
                time.sleep(600.0)
            case "is slow after its policy":
                experiment.CALL_TIMEOUT_S = 0.1  # type: ignore[misc] # of this process
                called(Seconds(12.0))
                called(None)
                time.sleep(0.3)
                raise ZeroDivisionError("the end")
    if cell.policy == "endless":
        time.sleep(600.0)
    setting: dict[str, object] = {"does": scenario.does}
    result = times(cell.policy, 1.0 + cell.seed, seed=cell.seed)
    return msgspec.structs.replace(result, options=cell.options, setting=setting)


def cells(folder: Path, *policies: str, seeds: int = 2, does: str = "works") -> list[Cell]:
    scenario = Scenario(folder=str(folder), does=does)
    return grid([(policy, {}) for policy in policies], [scenario], range(seeds))


def expected(cell: Cell) -> SimulationResult:
    made = times(cell.policy, 1.0 + cell.seed, seed=cell.seed)
    setting: dict[str, object] = {"does": cell.scenario.does}
    return msgspec.structs.replace(made, setting=setting, cell=cell_key(cell))


def started(folder: Path) -> set[str]:
    """The cells whose processes have written their ids."""
    files = (path for path in folder.iterdir() if path.suffix != ".jsonl")
    return {path.name for path in files if path.stat().st_size}


def test_a_grid_has_every_policy_in_every_scenario_with_every_seed() -> None:
    found = grid([("a", {}), ("b", {"x": 1})], ["s", "t"], [5, 6])

    assert [(cell.policy, cell.options, cell.scenario, cell.seed) for cell in found] == [
        ("a", {}, "s", 5), ("b", {"x": 1}, "s", 5), ("a", {}, "s", 6), ("b", {"x": 1}, "s", 6),
        ("a", {}, "t", 5), ("b", {"x": 1}, "t", 5), ("a", {}, "t", 6), ("b", {"x": 1}, "t", 6),
    ]  # fmt: skip


def test_equal_cells_have_the_same_key_and_others_do_not() -> None:
    def cell(**changes: object) -> Cell:
        fields = {"policy": "a", "options": {"x": 1, "y": 2}, "scenario": Scenario(folder="f")}
        return Cell(**({"seed": 1} | fields | changes))  # type: ignore[arg-type] # few are named

    assert cell_key(cell()) == cell_key(cell(options={"y": 2, "x": 1}))
    others = [cell(policy="b"), cell(seed=2), cell(options={}), cell(scenario=Scenario(folder="g"))]
    others.append(cell(code="5f2e"))
    assert len({cell_key(each) for each in [cell(), *others]}) == 6


@pytest.mark.slow
def test_results_have_the_order_of_the_cells(tmp_path: Path) -> None:
    wanted = cells(tmp_path, "a", "b")
    wanted.append(wanted[0])  # simulated once
    seen: list[ExperimentProgress] = []

    found = run(wanted, simulate, workers=3, on_progress=seen.append)

    assert found == [expected(cell) for cell in wanted]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}
    assert [(news.done, news.total) for news in seen] == [(done, 4) for done in range(5)]
    assert seen[0].cell is None
    assert {str(news.cell) for news in seen[1:]} == {str(cell) for cell in wanted}


@pytest.mark.slow
def test_results_in_the_file_are_not_simulated_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = run(cells(tmp_path, "a"), simulate, path)
    for name in started(tmp_path):
        (tmp_path / name).unlink()
    wanted = cells(tmp_path, "a", "b")
    seen: list[ExperimentProgress] = []

    found = run(wanted, simulate, path, workers=2, on_progress=seen.append)

    assert started(tmp_path) == {"b-0", "b-1"}
    assert (seen[0].done, seen[0].total) == (2, 4)
    assert found == [expected(cell) for cell in wanted]
    assert [each for each in load(path) if each.policy == "a"] == first
    assert len(load(path)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raises", "ZeroDivisionError: there is no speed (test_experiment.py:"),
        ("refuses", "unknown option; leave it out"),
        ("dies", "its worker was killed by SIGKILL; out of memory? try fewer workers"),
        ("exits", "its worker exited with code 7"),
        (
            "exits in its policy",
            "policy broken ended its process: its worker exited with code 0, at 12.0 s of virtual time",
        ),
        (
            "hangs in its policy",
            "policy broken did not return within 60 s, at 12.0 s of virtual time; correct the policy",
        ),
        ("is slow after its policy", "ZeroDivisionError: the end"),
    ],
)
def test_a_failed_cell_is_named_and_others_are_kept(tmp_path: Path, does: str, why: str) -> None:
    path = tmp_path / "results.jsonl"
    wanted = cells(tmp_path, "broken", "fine", does=does)

    with pytest.raises(CellsFailedError) as caught:
        run(wanted, simulate, path, workers=2)

    assert [failure.cell.seed for failure in caught.value.failures] == [0, 1]
    assert all(failure.reason.startswith(why) for failure in caught.value.failures)
    said = str(caught.value)
    assert said.startswith(f"2 failed: broken with seed 0 [{cell_key(wanted[0])[:8]}]: {why}")
    assert said.endswith(
        f"the 2 others are kept in {path}: run the same command again for these only"
    )
    assert {result.policy for result in load(path)} == {"fine"}
    assert len(caught.value.results) == 2


def test_a_file_that_cannot_be_written_is_refused_before_simulations(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="No such file or directory"):
        run(cells(tmp_path, "a"), simulate, tmp_path / "no" / "results.jsonl")
    assert started(tmp_path) == set()


def test_no_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1"):
        run(cells(tmp_path, "a"), simulate, workers=0)


LIMIT_S = 120.0
MAIN = """
import signal, sys
from pathlib import Path
from controlplane.sim.experiment import StoppedError, bar, run
from tests.unit.controlplane.sim.test_experiment import cells, simulate

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    folder = Path(sys.argv[1])
    wanted = cells(folder, "fine", seeds=1) + cells(folder, "endless")
    try:
        with bar() as shown:
            run(wanted, simulate, folder / "results.jsonl", 2, shown)
    except StoppedError as error:
        sys.exit(f"{error}")
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """An experiment of a cell that works and two without an end, in its own process group."""
    script = folder / "main.py"
    script.write_text(MAIN)
    root, temporary = str(HERE.parents[4]), folder.with_name(f"{folder.name}-tmp")
    temporary.mkdir()  # if the experiment is killed, its folder of sockets stays
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], cwd=root,
        env=os.environ | {"PYTHONPATH": root, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(what: str, folder: Path) -> None:
    """Look until the endless cells run and the other one is in the file."""
    end = time.monotonic() + LIMIT_S
    path = folder / "results.jsonl"
    while not ({"endless-0", "endless-1"} <= started(folder) and path.exists() and load(path)):
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(folder: Path) -> list[str]:
    """The cells whose processes still run."""
    names = []
    for name in sorted(started(folder) - {"main.py"}):
        status = Path("/proc", (folder / name).read_text(), "stat")
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        names += [name] if state != "Z" else []
    return names


@pytest.mark.slow
def test_ctrl_c_kills_the_workers_and_keeps_finished_results(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for("the cells did not start", tmp_path)

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    _, said = process.communicate(timeout=LIMIT_S)  # where its cells never end

    assert process.returncode == 1
    assert said.rstrip().endswith(
        "stopped after 1 of 3 simulations; "
        f"run the same command again to resume from {tmp_path / 'results.jsonl'}"
    )
    assert "Traceback" not in said
    assert alive(tmp_path) == []
    assert [result.policy for result in load(tmp_path / "results.jsonl")] == ["fine"]


@pytest.mark.slow
def test_ctrl_c_kills_a_starting_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_start = ForkServerProcess.start

    def start_and_interrupt(process: ForkServerProcess) -> None:
        really_start(process)
        end = time.monotonic() + LIMIT_S
        while "endless-0" not in started(tmp_path):
            assert time.monotonic() < end, "the cell did not start"
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ForkServerProcess, "start", start_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(StoppedError, match="stopped after 0 of 1 simulations"):
            run(cells(tmp_path, "endless", seeds=1), simulate)
    finally:
        signal.signal(signal.SIGINT, before)

    assert alive(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_stays_with_embedding_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int, handler: Any) -> None:
        """What Python says in such a program: there was no handler of Python, and none is set."""
        assert handler is not None, "signal handler must be SIG_IGN, SIG_DFL, or a callable object"
        taken.append(number)

    taken: list[int] = []
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", refuse)
    wanted = cells(tmp_path, "a")

    assert run(wanted, simulate) == [expected(cell) for cell in wanted]
    assert taken == []


@pytest.mark.slow
def test_workers_do_not_outlive_an_experiment_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for("the cells did not start", tmp_path)

    process.kill()
    process.communicate(timeout=LIMIT_S)

    end = time.monotonic() + LIMIT_S
    while alive(tmp_path):
        assert time.monotonic() < end, alive(tmp_path)
        time.sleep(0.02)


def test_the_bar_counts_cells_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with bar("comparing") as shown:
        shown(ExperimentProgress(0, 0, 3))
        shown(ExperimentProgress(2, 1, 3))

    said = capfd.readouterr()
    assert said.out == ""
    assert "comparing" in said.err
    assert "3/3" in said.err
    assert "1 failed" in said.err


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

"""Which line of a script a training thread is at, and when its stall is reported."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import pytest
import torch

from elastic.collectives.backend_protocol import wait_for
from elastic.stall_watch import Stall, StallWatch, is_waiting, script_place
from schemas.wire.agent import MAX_PLACE, STALL_INTERVAL_S, STALL_S

HERE: Final = Path(__file__).parent
INSTALLED: Final = Path(sysconfig.get_path("purelib")) / "framework" / "loops.py"

# Files of a job's working directory; `block` waits in the standard library.
SCRIPT: Final = """
class Trainer:
    def evaluate(self):
        block()

def evaluate_in_a_framework():
    framework(block)
"""
FRAMEWORK: Final = """
def framework(function):
    function()
"""


@contextmanager
def blocked_in(function: Callable[[], object], reached: threading.Event) -> Iterator[FrameType]:
    """Yield the frame of a thread that runs `function`, once that has set `reached`."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    assert reached.wait(60.0)
    assert thread.ident is not None
    yield sys._current_frames()[thread.ident]


class Blocked:
    """A call that blocks until the test is over."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        self.over.wait()


@pytest.fixture
def block() -> Iterator[Blocked]:
    blocked = Blocked()
    yield blocked
    blocked.over.set()


def names(block: Blocked, text: str, path: Path, **more: Any) -> dict[str, Any]:
    """The names that a file of this path defines."""
    found: dict[str, Any] = {"block": _of_the_library(block), "__name__": "train", **more}
    exec(compile(text, path, "exec"), found)  # noqa: S102
    return found


def _of_the_library(block: Blocked) -> Callable[..., bool]:
    """`block` as a function of Python's library, whose frames no place names."""
    path = Path(json.__file__)
    found: dict[str, Any] = {"block": block}
    text = "def call(*_):\n    block.reached.set()\n    return block.over.wait()"
    exec(compile(text, path, "exec"), found)  # noqa: S102
    call: Callable[..., bool] = found["call"]
    return call


def test_the_place_is_the_innermost_line_of_the_script(tmp_path: Path, block: Blocked) -> None:
    trainer = names(block, SCRIPT, tmp_path / "src" / "train.py")["Trainer"]()

    with blocked_in(trainer.evaluate, block.reached) as frame:
        places = [script_place(frame, home) for home in (tmp_path, tmp_path / "other", None)]

    named = "train.py:4 in Trainer.evaluate"
    assert places == [f"src/{named}", named, named]
    assert not is_waiting(frame)


def test_frames_of_packages_between_the_script_and_its_functions_are_skipped(
    tmp_path: Path, block: Blocked
) -> None:
    framework = names(block, FRAMEWORK, INSTALLED)["framework"]
    found = names(block, SCRIPT, tmp_path / "train.py", framework=framework)

    with blocked_in(found["evaluate_in_a_framework"], block.reached) as frame:
        place = script_place(frame, tmp_path)

    assert place == "train.py:7 in evaluate_in_a_framework"


@pytest.mark.parametrize(
    "path",
    [
        INSTALLED,
        Path(torch.__file__).parent / "nn" / "modules" / "module.py",
        HERE.parents[2] / "elastic" / "agent.py",
        Path("/job/.venv/lib/python3.12/site-packages/plugin.py"),
        Path("<frozen runpy>"),
    ],
)
def test_a_thread_outside_of_the_script_has_no_place(path: Path, block: Blocked) -> None:
    framework = names(block, FRAMEWORK, path)["framework"]

    with blocked_in(partial(framework, _of_the_library(block)), block.reached) as frame:
        assert script_place(frame) == ""

    assert script_place(None) == ""


def test_a_place_is_short(tmp_path: Path, block: Blocked) -> None:
    long = names(block, f"def {'f' * 300}():\n    block()", tmp_path / "train.py")["f" * 300]

    with blocked_in(long, block.reached) as frame:
        place = script_place(frame, tmp_path)

    assert (len(place), place[:16]) == (MAX_PLACE, "train.py:2 in ff")


def test_a_thread_that_waits_for_its_peers_is_known_by_its_function(
    tmp_path: Path, block: Blocked
) -> None:
    ready: Any = SimpleNamespace(wait=_of_the_library(block))
    reduce = partial(wait_for, ready, threading.Event())
    found = names(block, "def train():\n    reduce()", tmp_path / "train.py", reduce=reduce)

    with blocked_in(found["train"], block.reached) as frame:
        assert is_waiting(frame)
        assert script_place(frame, tmp_path) == "train.py:2 in train"


def test_a_script_that_runs_inside_of_a_wait_does_not_wait(tmp_path: Path, block: Blocked) -> None:
    called = names(block, "def callback():\n    block()", tmp_path / "train.py")["callback"]

    class Ready(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            called()
            return True

    with blocked_in(lambda: wait_for(Ready(), threading.Event()), block.reached) as frame:
        assert not is_waiting(frame)


class Watched:
    """A watch with a clock of its own over a thread that waits or does not."""

    def __init__(self) -> None:
        self.now, self.waiting, self.step = 100.0, False, 7
        self.watch = StallWatch(1, lambda: self.now, dict)

    def passes(self, seconds: int) -> list[tuple[float, float | None]]:
        """Look once a second; return what is reported."""
        found: list[Stall] = []
        for _ in range(seconds):
            self.now += 1.0
            if (stall := self.watch.look(2, self.step)) is not None:
                found.append(stall)
        return [(stall.idle_s, stall.waits_s) for stall in found]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched()
    monkeypatch.setattr("elastic.stall_watch.is_waiting", lambda _: made.waiting)
    made.passes(1)  # the first look
    return made


def test_a_stall_is_reported_after_its_time_and_then_again(watched: Watched) -> None:
    before = watched.passes(int(STALL_S) - 1)
    reports = watched.passes(int(2 * STALL_INTERVAL_S) + 1)

    assert before == []
    assert reports == [(30.0, None), (40.0, None), (50.0, None)]


def test_a_thread_that_makes_steps_reports_nothing(watched: Watched) -> None:
    reports = []
    for _ in range(20):
        reports += watched.passes(int(STALL_S) - 1)
        watched.step += 1

    assert reports == []


def test_the_step_that_ends_a_stall_is_reported_once(watched: Watched) -> None:
    watched.passes(int(STALL_S))
    watched.step += 1

    assert watched.passes(3) == [(0.0, None)]


def test_a_wait_that_begins_late_is_reported_when_it_begins_and_when_it_was_long(
    watched: Watched,
) -> None:
    watched.passes(int(STALL_S) + 4)
    watched.waiting = True

    reports = watched.passes(int(STALL_S) + 1)

    assert reports == [(35.0, 0.0), (45.0, 10.0), (55.0, 20.0), (65.0, 30.0)]

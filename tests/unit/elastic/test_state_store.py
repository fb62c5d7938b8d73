"""States that a sweep worker keeps, and causes of failed units."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.sweep_worker import state_store
from elastic.sweep_worker.process import fault_of
from elastic.sweep_worker.staged_data import DataDiffersError
from elastic.sweep_worker.state_store import DiskFullError, StateLostError, StateStore
from elastic.sweep_worker.unit import StateFramesError, digest
from elastic.sweep_worker.unit_runner import UnitFailedError, UnitResult
from elastic.training_errors import UsageError
from schemas.host.state_files import read_frames
from schemas.ids import JobId, WorkerId
from schemas.wire.files import AskState
from schemas.wire.sweeps import StateRef, UnitOrder

JOB = JobId("search-1")


def order(attempt: int, version: int) -> UnitOrder:
    return UnitOrder(
        attempt=attempt, worker=WorkerId("w"), trial=0, values={}, state=None, sources=(),
        result=StateRef(trial=0, version=version), epoch=1, partition=0, evaluate=False,
    )  # fmt: skip


def result(text: bytes) -> UnitResult:
    frames = [b"header", text]
    return UnitResult(frames, digest(frames), {}, 1, {})


def ask(version: int, left: UnitResult) -> AskState:
    return AskState(job=JOB, trial=0, version=version, digest=left.digest, offset=0)


def test_a_state_is_served_from_memory_and_disk(tmp_path: Path) -> None:
    one = result(b"one")
    store = StateStore(JOB, tmp_path)
    store.put(order(1, 1), one)

    for holder in (store, StateStore(JOB, tmp_path)):
        parts = holder.find(ask(1, one))
        assert parts is not None
        frames = read_frames(b"".join(map(bytes, parts)), one.digest)
        assert [bytes(frame) for frame in frames] == one.frames
    assert store.find(ask(1, result(b"another"))) is None


def test_requests_of_other_jobs_have_no_key(tmp_path: Path) -> None:
    store = StateStore(JOB, tmp_path)
    assert store.key_of(JOB) == ""

    store.key = "a key"

    assert (store.key_of(JOB), store.key_of(JobId("other-1"))) == ("a key", "")


def test_memory_keeps_the_newest_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "MAX_CACHED_BYTES", 250)
    states = [result(bytes([at]) * 100) for at in range(3)]
    store = StateStore(JOB, tmp_path)
    for at, state in enumerate(states, start=1):
        store.put(order(at, at), state)
    for path in tmp_path.iterdir():
        path.unlink()

    found = [store.find(ask(at, state)) is not None for at, state in enumerate(states, start=1)]

    assert found == [False, True, True]


def test_a_full_disk_names_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    folder.write_text("no folder")

    with pytest.raises(DiskFullError, match=r"a state of 0\.0 MB to .*free space there"):
        StateStore(JOB, folder).put(order(1, 1), result(b"one"), limit_s=0.0)


@pytest.mark.parametrize(("error", "fault"), [
    (UnitFailedError("train_fn", KeyError("x")), "trial"),
    (UnitFailedError("input_fn", KeyError("x")), "data"),
    (UsageError("input_fn gave no data", "give some", "input_fn"), "data"),
    (UsageError("model_fn gave a int", "a model", "model_fn"), "trial"),
    (DataDiffersError("partition 1", 3, 4), "data"),
    (StateLostError("nobody has it"), "state"),
    (StateFramesError("no state"), "state"),
    (DiskFullError("no room"), "disk"),
    (OSError(28, "No space left on device"), "disk"),
    (RuntimeError("size mismatch"), "trial"),
])  # fmt: skip
def test_an_error_has_its_fault(error: Exception, fault: str) -> None:
    assert fault_of(error)[0] == fault


def test_a_reason_is_one_printable_line() -> None:
    _, why = fault_of(RuntimeError("CUDA out of memory.\n\tTried \x1b[31m20 GiB" + "x" * 9000))

    assert why.startswith("CUDA out of memory. Tried  [31m20 GiBxxx")
    assert len(why) == 2000
    assert "\n" not in why

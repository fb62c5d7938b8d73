"""Jobs as lines, at any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.cli.job_list import Choice, cut, job_lines, none_found, redraw, screen, table
from schemas.errors import OnesError, UnreachableError
from schemas.jobs import STATES
from schemas.wire.client import Jobs
from tests.support.builders import A, B
from tests.support.client_examples import summary

RUNNING = summary(
    A, state="running", slots=2, global_batch=128, lr=0.01, epoch=15, samples_per_s=1088.4,
    reason="grows to 2 slots and batch 128 (1.87 x the speed expected): no other job needs them more",
    progress=0.5, train_loss=0.54812, metrics={"accuracy": 0.998, "top5": 1.0}, queued_s=0.2,
    running_s=95.0,
)  # fmt: skip
QUEUED = summary(B, reason="waits for 1 slot, 0 free", queued_s=4000.0)


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (None, [
            "job  user  state    slots  batch    lr  epoch  done  samples/s    loss  metrics                 queued    ran  why",
            f"a-1  ann   running      2    128  0.01     15   50%       1088  0.5481  accuracy 0.998, top5 1    0.2s  1m35s  {RUNNING.reason}",
            "b-2  ann   queued                           0    0%                                              1h06m   0.0s  waits for 1 slot, 0 free"]),
        (120, [
            "job  user  state    slots  batch  done  samples/s    loss  metrics                   ran  why",
            "a-1  ann   running      2    128   50%       1088  0.5481  accuracy 0.998, top5 1  1m35s  grows to 2 slots and batch 12…",
            "b-2  ann   queued                   0%                                              0.0s  waits for 1 slot, 0 free"]),
        (80, [
            "job  user  state    slots  batch  done  samples/s  why",
            "a-1  ann   running      2    128   50%       1088  grows to 2 slots and batch 1…",
            "b-2  ann   queued                   0%             waits for 1 slot, 0 free"]),
    ],
)  # fmt: skip
def test_a_narrow_table_omits_columns_before_the_reason_is_cut(
    width: int | None, text: list[str]
) -> None:
    assert job_lines([RUNNING, QUEUED], width) == text


def test_empty_columns_are_omitted() -> None:
    assert job_lines([QUEUED], None)[0] == "job  user  state   epoch  done  queued   ran  why"


@given(
    st.integers(10, 250),
    st.lists(st.builds(dict, reason=st.text(), user=st.text(max_size=30)), min_size=1, max_size=5),
)
def test_a_job_is_one_line_that_fits_whatever_its_texts_are(
    width: int, said: list[dict[str, Any]]
) -> None:
    jobs = [summary(A, state=STATES[n], **fields) for n, fields in enumerate(said)]

    lines = job_lines(jobs, width)

    assert len(lines) == 1 + len(jobs)
    for line in lines:
        assert line.isprintable()
        assert len(line) <= width


def test_wide_characters_count_twice() -> None:
    assert cut("訓練 is under way", 8) == "訓練 is…"
    assert cut("訓練", 4) == "訓練"


def test_colour_goes_around_the_state_alone() -> None:
    job = summary(A, state="running", user="running", reason="running")

    assert job_lines([job], None, str.upper)[1:] == [
        "a-1  running  RUNNING      0    0%    0.0s  0.0s  running"
    ]


def test_without_jobs_a_remark_replaces_the_table() -> None:
    assert table(Jobs(jobs=()), 80) == []
    choices = ((), (True,), (False, "", "ann"), (True, "", "a"))
    assert [none_found(Choice(*choice)) for choice in choices] == [
        "no job waits or runs; -a includes ended jobs",
        "no job yet",
        "no such job; -a includes ended jobs",
        "no such job",
    ]


def test_a_watched_list_tolerates_an_absent_controller_after_the_first_reply() -> None:
    replies = iter([Jobs(jobs=(QUEUED,)), UnreachableError("gone"), Jobs(jobs=(RUNNING,))])
    pauses, terminal = iter([0, 0]), io.StringIO()

    def ask() -> Jobs:
        reply = next(replies)
        if isinstance(reply, OnesError):
            raise reply
        return reply

    def pause(seconds: float) -> None:
        assert seconds == 1.0
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        redraw(ask, terminal, pause)

    tops = [frame.split("\x1b[K")[0] for frame in terminal.getvalue().split("\x1b[H")[1:]]
    absent = " - the controller does not reply, retrying"
    assert tops == [
        "0 on slots, 1 queued", f"0 on slots, 1 queued{absent}", "1 on slots, 0 queued"
    ]  # fmt: skip
    replies = iter([UnreachableError("gone")])
    with pytest.raises(UnreachableError):
        redraw(ask, terminal, pause)


@pytest.mark.parametrize(("height", "rows"), [(24, 12), (8, 3)])
def test_a_watched_list_fits_the_screen_and_counts_the_rest(height: int, rows: int) -> None:
    found = Jobs(jobs=(*(summary(B) for _ in range(11)), RUNNING))

    shown = screen(found, 80, height, "the controller does not reply, retrying")

    assert shown[0] == "1 on slots, 11 queued - the controller does not reply, retrying"
    assert sum("ann" in line for line in shown) == rows
    assert len(shown) <= height - 1
    if rows < len(found.jobs):
        assert shown[-1] == "9 more: --state, --user, --name"

"""Output of `ones show`, `explain` and `events`, and jobs as lines."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.cli import job_list
from controlplane.cli.jobs import history_lines, print_decisions, print_job, report_gaps
from schemas.errors import OnesError, UnreachableError
from schemas.ids import JobId, Seconds
from schemas.jobs import STATES, StopRule
from schemas.wire.client import Decision, Explanation, JobDetail, Jobs, SearchInfo, Size
from schemas.wire.feed import FeedEvent
from tests.support.builders import A, B
from tests.support.client_examples import summary
from tests.support.schemas_examples import EXAMPLES

DETAIL = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)


def shown(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    """Print the example job with changes."""
    print_job(replace(DETAIL, **changes))
    return capsys.readouterr().out.splitlines()


PLAIN, FIRST = replace(DETAIL.spec, sweep=None), replace(DETAIL.epochs[0], left_early=False)


@pytest.mark.parametrize(
    ("changes", "line", "absent"),
    [
        ({"epochs": (replace(FIRST, epoch=3), replace(FIRST, epoch=4, trained_samples=512, epoch_samples=1000, left_early=True))},
         "epoch 4: 512 of 1000 samples (the script left its loop)", "epoch 3: "),
        ({"spec": PLAIN, "epochs": (replace(FIRST, epoch=4, train_loss=None),)},
         f"epoch 4: no finite loss: nan, or backward() was not called; see `ones logs {DETAIL.summary.job}`", "nothing"),
        ({"spec": PLAIN, "summary": replace(DETAIL.summary, metrics={}), "exit_code": None},
         "  metrics    none; agent.report(accuracy=...) in the script gives some", "exit code"),
    ],
    ids=["an epoch whose loop the script left", "a missing loss", "missing metrics"],
)  # fmt: skip
def test_what_an_epoch_lacks_is_explained(
    changes: dict[str, Any], line: str, absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, **changes)

    assert line in lines
    assert not any(absent in other for other in lines)


def test_history_is_folded_to_the_width_of_a_terminal() -> None:
    at_noon = replace(
        DETAIL.history[0],
        time=1_760_011_200.0, from_state="running", to_state="rescaling",
        reason="root asked for 2 slots: 1 -> 2 slots, batch 32 -> 64, whatever the policy thinks",
    )  # fmt: skip
    later = replace(at_noon, time=1_760_097_600.0, reason="again")
    detail = replace(DETAIL, history=(at_noon, later))

    folded = list(history_lines(detail, 80))

    assert folded == [
        "  2025-10-09",
        "  12:00:00Z  running -> rescaling: root asked for 2 slots: 1 -> 2 slots, batch",
        "             32 -> 64, whatever the policy thinks",
        "  2025-10-10",
        "  12:00:00Z  running -> rescaling: again",
    ]
    assert (
        list(history_lines(detail, None))[1]
        == f"  12:00:00Z  running -> rescaling: {at_noon.reason}"
    )


MORNING = 1_760_000_000.0  # 08:53:20Z


@pytest.mark.parametrize(
    ("state", "ended", "expected", "said"),
    [
        ("running", None, 60.0, "2025-10-09T08:54:20Z"),
        ("running", None, 90.0, "2025-10-09T08:54:20Z, expected 08:54:50Z: 30.0s late"),
        ("queued", None, 50.0, "2025-10-09T08:54:20Z, expected 08:54:10Z: 10.0s early"),
        ("succeeded", 60.0, 60.0, "2025-10-09T08:54:20Z, done 08:54:20Z: kept, 0.0s early"),
        ("succeeded", 30.0, 60.0, "2025-10-09T08:54:20Z, done 08:53:50Z: kept, 30.0s early"),
        ("succeeded", 61.0, 60.0, "2025-10-09T08:54:20Z, done 08:54:21Z: broken, 1.0s late"),
        ("succeeded", 60.0 + 86_400.0, 60.0, "2025-10-09T08:54:20Z, done 2025-10-10T08:54:20Z: broken, 24h00m late"),
        ("failed", 30.0, 60.0, "2025-10-09T08:54:20Z, but it failed"),
        ("cancelled", 30.0, 60.0, "2025-10-09T08:54:20Z, but it was cancelled"),
    ],
)  # fmt: skip
def test_a_promised_end_is_compared_with_the_actual_end(
    state: str, ended: float | None, expected: float, said: str
) -> None:
    job = summary(
        JobId("a-1"), state=state, ended_at=None if ended is None else MORNING + ended,
        promised_end=MORNING + 60.0, expected_end=MORNING + expected,
    )  # fmt: skip

    assert job_list.describe_promise(job) == said
    assert job_list.describe_promise(summary(JobId("a-1"), state=state)) == ""


def test_a_promise_and_its_later_changes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    later = replace(DETAIL.promises[0], end=DETAIL.promises[0].end + 5.0)
    ended = replace(DETAIL.summary, state="succeeded")

    lines = shown(capsys, summary=ended, promises=(*DETAIL.promises, later))

    assert "  promised   2025-10-09T08:55:00Z, done 08:54:25Z: kept, 35.2s early" in lines
    assert sum("2025-10-09T08:55:05Z" in line for line in lines) == 1


def test_decisions_end_with_the_accuracy_of_the_scheduler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explanation = Explanation(job=JobId("a-1"), state="running", decisions=())
    search = SearchInfo(
        policy="ones", running=True, generations=120, best_fitness=1.5, mean_fitness=1.25,
        diversity=0.348, decision_ms=2.54, rescales=7, batch_changes=2, predicted_gain=1.44,
        realised_gain=1.5, gain_error=1.1, length_error=0.123, length_coverage_80=0.777,
    )  # fmt: skip

    print_decisions(explanation, search, numbers=False)

    assert capsys.readouterr().out.splitlines()[-5:] == [
        "the scheduler, over all jobs",
        "  changes      7 of slots, 2 of the batch alone",
        "  speed-up     measured 1.50 x, expected 1.44 x; off by 1.10 x each",
        "  work left    off by 12%; 78% within the interval that is meant for 80%",
        "  search       120 generations, fitness 1.5 (mean 1.25), diversity 0.35, 2.5 ms a decision",
    ]


@pytest.mark.parametrize(
    ("end", "head"), [("", "a-1  failed"), ("ValueError (train.py:3)", "a-1  failed: ValueError (train.py:3)")]
)  # fmt: skip
def test_decisions_begin_with_the_reason_of_the_end(
    end: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = Explanation(job=JobId("a-1"), state="failed", decisions=())
    idle = SearchInfo(policy="fifo", running=False, generations=0, best_fitness=0.0, mean_fitness=0.0,
                      diversity=0.0, decision_ms=0.0, rescales=0, batch_changes=0)  # fmt: skip

    print_decisions(explanation, idle, numbers=False, end=end)

    assert capsys.readouterr().out.splitlines()[0] == head


@pytest.mark.parametrize(
    ("stop", "total", "text"),
    [
        (StopRule(epochs=20), 20, "7 of 20 finished"),
        (StopRule(metric="accuracy", at_least=0.9, epochs=20), 20, "7 of at most 20 finished"),
        (None, None, "7 finished"),
    ],
)
def test_epochs_are_those_that_are_finished(
    stop: StopRule | None, total: int | None, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = summary(A, state="failed", epoch=7)

    print_job(replace(DETAIL, summary=job, spec=replace(PLAIN, stop=stop), epochs_total=total))

    assert f"  epochs     {text}\n" in capsys.readouterr().out


def test_a_waiting_job_says_since_when_it_waits_and_when_its_reason_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits = Decision(
        time=Seconds(3600.0), before=Size(), to=Size(), reason="no slot is free", outcome="waits",
        took_s=90.0,
    )  # fmt: skip

    told = Explanation(job=A, state="queued", decisions=(waits,))
    print_decisions(told, SearchInfo(policy="fifo", running=True), numbers=False)

    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("01:"))
    assert re.split(" {2,}", row) == [
        "01:00:00", "waits", "waits", "policy", "waits 1m30s", "no slot is free (at 01:01:30)",
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "gap"), [(1, "1 to 7"), (0, "1 to 7"), (7, "7 to 7"), (8, "")])
def test_the_gap_before_the_first_kept_event_is_reported(
    first: int, gap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [
        FeedEvent(seq=seq, time=Seconds(0.0), event="job.epoch", job=None, node=None, detail={})
        for seq in (8, 9, 10)
    ]

    assert list(report_gaps(kept, first)) == kept
    said = f"ones: events {gap} are no longer kept (keep_events_s, keep_bytes)\n" if gap else ""
    assert capsys.readouterr().err == said


RUNNING = summary(
    A, state="running", slots=2, global_batch=128, lr=0.01, epoch=15, samples_per_s=1088.4,
    reason="grows to 2 slots and batch 128 (expected: 1.87 x its present speed): no other job needs them more",
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
    assert job_list.job_lines([RUNNING, QUEUED], width) == text


def test_empty_columns_are_omitted() -> None:
    assert (
        job_list.job_lines([QUEUED], None)[0] == "job  user  state   epoch  done  queued   ran  why"
    )


@given(
    st.integers(10, 250),
    st.lists(st.builds(dict, reason=st.text(), user=st.text(max_size=30)), min_size=1, max_size=5),
)
def test_a_job_is_one_line_that_fits_whatever_its_texts_are(
    width: int, said: list[dict[str, Any]]
) -> None:
    jobs = [summary(A, state=STATES[n], **fields) for n, fields in enumerate(said)]

    lines = job_list.job_lines(jobs, width)

    assert len(lines) == 1 + len(jobs)
    for line in lines:
        assert line.isprintable()
        assert len(line) <= width


def test_wide_characters_count_twice() -> None:
    assert job_list.cut("訓練 is under way", 8) == "訓練 is…"
    assert job_list.cut("訓練", 4) == "訓練"


def test_colour_goes_around_the_state_alone() -> None:
    job = summary(A, state="running", user="running", reason="running")

    assert job_list.job_lines([job], None, str.upper)[1:] == [
        "a-1  running  RUNNING      0    0%    0.0s  0.0s  running"
    ]


def test_without_jobs_a_remark_replaces_the_table() -> None:
    assert job_list.table(Jobs(jobs=()), 80) == []
    choices: list[dict[str, Any]] = [
        {}, {"all_": True}, {"user": "ann"}, {"all_": True, "label": ["team=a"]},
    ]  # fmt: skip
    assert [job_list.none_found(job_list.Choice(**choice)) for choice in choices] == [
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
        job_list.redraw(ask, terminal, pause)

    tops = [frame.split("\x1b[K")[0] for frame in terminal.getvalue().split("\x1b[H")[1:]]
    absent = " - the controller does not reply, retrying"
    assert tops == [
        "0 on slots, 1 queued", f"0 on slots, 1 queued{absent}", "1 on slots, 0 queued"
    ]  # fmt: skip
    replies = iter([UnreachableError("gone")])
    with pytest.raises(UnreachableError):
        job_list.redraw(ask, terminal, pause)


@pytest.mark.parametrize(("height", "rows"), [(24, 12), (8, 3)])
def test_a_watched_list_fits_the_screen_and_counts_the_rest(height: int, rows: int) -> None:
    found = Jobs(jobs=(*(summary(B) for _ in range(11)), RUNNING))

    shown = job_list.screen(found, 80, height, "the controller does not reply, retrying")

    assert shown[0] == "1 on slots, 11 queued - the controller does not reply, retrying"
    assert sum("ann" in line for line in shown) == rows
    assert len(shown) <= height - 1
    if rows < len(found.jobs):
        assert shown[-1] == "9 more: --state, --user, --name"

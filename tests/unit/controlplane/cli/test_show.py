"""What `ones show` prints of a job."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.cli.job_list import describe_promise
from controlplane.cli.jobs import history_lines, print_decisions, print_job
from schemas.ids import JobId
from schemas.wire.client import Explanation, JobDetail, SearchInfo
from tests.support.client_examples import summary
from tests.support.schemas_examples import EXAMPLES


def test_an_epoch_whose_loop_the_script_left_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    first = msgspec.structs.replace(
        detail.epochs[0], epoch=3, trained_samples=1000, epoch_samples=1000, left_early=False
    )
    second = msgspec.structs.replace(first, epoch=4, trained_samples=512, left_early=True)

    print_job(msgspec.structs.replace(detail, epochs=(first, second)))

    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert said[1:] == ["epoch 4: 512 of 1000 samples (the script left its loop)"]


def test_a_last_epoch_without_a_finite_loss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    plain = msgspec.structs.replace(detail.spec, sweep=None)
    diverged = msgspec.structs.replace(detail.epochs[0], epoch=4, train_loss=None, left_early=False)

    print_job(msgspec.structs.replace(detail, spec=plain, epochs=(diverged,)))

    job = detail.summary.job
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"epoch 4: no finite loss: nan, or backward() was not called; see `ones logs {job}`"
    )


def test_a_job_without_metrics_says_where_they_come_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    bare = msgspec.structs.replace(
        detail,
        spec=msgspec.structs.replace(detail.spec, sweep=None),
        summary=msgspec.structs.replace(detail.summary, metrics={}),
        exit_code=None,
    )

    print_job(bare)

    said = capsys.readouterr().out
    assert "  metrics    none; agent.report(accuracy=...) in the script gives some\n" in said
    assert "exit code" not in said


def test_history_is_folded_to_the_width_of_a_terminal_and_loses_no_word() -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    at_noon = msgspec.structs.replace(
        detail.history[0],
        time=1_760_011_200.0, from_state="running", to_state="rescaling",
        reason="root asked for 2 slots: 1 -> 2 slots, batch 32 -> 64, whatever the policy thinks",
    )  # fmt: skip
    later = msgspec.structs.replace(at_noon, time=1_760_097_600.0, reason="again")
    detail = msgspec.structs.replace(detail, history=(at_noon, later))

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
        (
            "succeeded", 60.0 + 86_400.0, 60.0,
            "2025-10-09T08:54:20Z, done 2025-10-10T08:54:20Z: broken, 24h00m late",
        ),
        ("failed", 30.0, 60.0, "2025-10-09T08:54:20Z, but it failed"),
        ("cancelled", 30.0, 60.0, "2025-10-09T08:54:20Z, but it was cancelled"),
    ],
)  # fmt: skip
def test_a_promised_end_is_held_against_what_came(
    state: str, ended: float | None, expected: float, said: str
) -> None:
    job = summary(
        JobId("a-1"),
        state=state,
        ended_at=None if ended is None else MORNING + ended,
        promised_end=MORNING + 60.0,
        expected_end=MORNING + expected,
    )

    assert describe_promise(job) == said
    assert describe_promise(summary(JobId("a-1"), state=state)) == ""


def test_a_promise_is_shown_and_so_is_what_was_said_of_it_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    later = msgspec.structs.replace(detail.promises[0], end=detail.promises[0].end + 5.0)

    ended = msgspec.structs.replace(detail.summary, state="succeeded")

    print_job(msgspec.structs.replace(detail, summary=ended, promises=(*detail.promises, later)))

    shown = capsys.readouterr().out.splitlines()
    assert "  promised   2025-10-09T08:55:00Z, done 08:54:25Z: kept, 35.2s early" in shown
    assert sum("2025-10-09T08:55:05Z" in line for line in shown) == 1


def test_decisions_end_with_how_far_off_the_scheduler_was(
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
        "  speed-up     1.50 x, of 1.44 x expected; off by 1.10 x each",
        "  work left    off by 12%; 78% within the interval that is meant for 80%",
        "  search       120 generations, fitness 1.5 (mean 1.25), diversity 0.35, 2.5 ms a decision",
    ]

"""Commands about one job, from `show` to `events`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import moment, plain, print_data, print_json, print_line
from controlplane.cli.show_and_explain import print_decisions, print_job
from controlplane.client import BlockingClient
from schemas.errors import BadFieldError, UnreachableError
from schemas.messages.client import JobDetail
from schemas.messages.feed import FeedEvent


def show(job: JobName, *, common: Common = COMMON) -> int:
    """Show everything about JOB: what it asked for, its workers, its history and its epochs."""
    with BlockingClient(common.home) as client:
        detail = client.job(job)
    if common.output in {"json", "jsonl"}:
        flat = plain(detail)
        print_data({**flat.pop("summary"), **flat}, common.output)
    else:
        print_job(detail)
    return Exit.OK


def explain(
    job: JobName,
    *,
    numbers: Annotated[bool, Parameter(help="those behind each decision, too")] = False,
    common: Common = COMMON,
) -> int:
    """Say why JOB has its slots and its batch: every decision and its reason."""
    with BlockingClient(common.home) as client:
        explanation = client.explain(job)
        search = client.search()
    if common.output == "json":
        print_json({**plain(explanation), "search": search})
    elif common.output == "jsonl":
        for decision in explanation.decisions:
            print_line(decision)
    else:
        print_decisions(explanation, search, numbers=numbers)
    return Exit.OK


def resize(
    job: JobName,
    *,
    slots: Annotated[int | None, Parameter(help="how many; 0 pauses it")] = None,
    batch: Annotated[int | None, Parameter(help="global, samples per step")] = None,
    on: Annotated[list[str] | None, Parameter(help="exactly these slots, NODE/INDEX")] = None,
    auto: Annotated[bool, Parameter(help="give it back to the policy instead")] = False,
    common: Common = COMMON,
) -> int:
    """Change the size of JOB while it trains; the policy leaves it alone until --auto."""
    if auto and not (slots is None and batch is None and on is None):
        what = "--auto gives the job back to the policy, which chooses its size"
        raise BadFieldError(what, "leave out --slots, --batch and --on, or --auto", "auto")
    with BlockingClient(common.home) as client:
        if auto:
            detail = client.resume(job, auto=True)
        else:
            detail = client.resize(job, slots, batch, on or ())
        return _moved(client, detail, common)


def pause(job: JobName, *, common: Common = COMMON) -> int:
    """Take the slots of JOB away; it goes on from the same step when it is resumed."""
    with BlockingClient(common.home) as client:
        detail = client.pause(job)
        return _moved(client, detail, common)


def resume(job: JobName, *, auto: bool = False, common: Common = COMMON) -> int:
    """End a pause of JOB; with --auto, give it back to the policy."""
    with BlockingClient(common.home) as client:
        detail = client.resume(job, auto=auto)
        return _moved(client, detail, common)


def samples(job: JobName, *, common: Common = COMMON) -> int:
    """Print which samples each committed step of JOB took (needs record_samples in its file)."""
    with BlockingClient(common.home) as client:
        print_data(client.samples(job), "json" if common.output == "json" else "jsonl")
    return Exit.OK


def events(
    *,
    from_: Annotated[int, Parameter(name="--from", help="first sequence number")] = 1,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="for ever")] = False,
    common: Common = COMMON,
) -> int:
    """Print what happened in the cluster, from the journal, without gaps."""
    if follow and common.output == "json":
        what = "-o json is one document, and events that are followed have no end"
        raise BadFieldError(what, "use -o jsonl: a document on each line", "output")
    with BlockingClient(common.home) as client:
        if follow:
            say_if_absent(client)
        found = told_of_gaps(client.events(from_, follow=follow), from_)
        if common.output in {"json", "jsonl"}:
            print_data(map(_event_row, found), common.output)
            return Exit.OK
        for event in found:
            detail = " ".join(f"{k}={v}" for k, v in event.detail.items() if v is not None)
            who = event.job or event.node or "cluster"
            sys.stdout.write(
                f"{event.seq:6d} {moment(event.time)} {event.event:16s} {who} {detail}\n"
            )
            sys.stdout.flush()
    return Exit.OK


def _event_row(event: FeedEvent) -> dict[str, Any]:
    return {
        **event.detail,
        "seq": event.seq,
        "time": event.time,
        "type": event.event,
        "job": event.job,
        "node": event.node,
    }


def told_of_gaps(events: Iterable[FeedEvent], first: int) -> Iterator[FeedEvent]:
    """The same events, with a line on stderr wherever some are not kept any more.

    Args:
        events: in order.
        first: number of the one that was asked for, 1-based.
    """
    expected = max(1, first)
    for event in events:
        if event.seq > expected:
            sys.stderr.write(
                f"ones: events {expected} to {event.seq - 1} are not kept any more "
                "(keep_events_s, keep_bytes)\n"
            )
        expected = event.seq + 1
        yield event


def say_if_absent(client: BlockingClient) -> None:
    """Say at once that no controller is there; those who wait and follow go on for a minute."""
    try:
        client.cluster()
    except UnreachableError as error:
        sys.stderr.write(f"ones: {error}; trying for a minute\n")


def _moved(client: BlockingClient, detail: JobDetail, common: Common) -> int:
    job = detail.summary
    if common.output in {"json", "jsonl"}:
        row = {"job": job.job, "state": job.state, "reason": job.reason, "slots": job.slots}
        print_data(row, common.output)
    elif common.output == "table":
        sys.stdout.write(f"{job.job} {job.state}: {job.reason}\n")
        last = client.explain(job.job).decisions[-1:] if job.state == "rescaling" else ()
        if last and last[0].outcome == "ordered":  # what was said above is from before
            sys.stdout.write(f"{job.job}: {last[0].why}; it begins when that is done\n")
    return Exit.OK

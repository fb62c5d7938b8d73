"""Commands about one job, from `show` to `events`, and their output for people."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

from cyclopts import Parameter

from controlplane.cli.job_list import describe_promise, use_in_words
from controlplane.cli.output import COMMON, Common, JobName, plain, print_data, print_table, say
from controlplane.cli.terminal import width_of
from controlplane.client import BlockingClient
from controlplane.client.formats import moment, second, span
from controlplane.client.sbatch import command_line
from schemas.errors import BadFieldError, UnreachableError
from schemas.jobs import ENDED, JobSpec
from schemas.wire.client import Decision, Explanation, JobDetail, SearchInfo, Size
from schemas.wire.feed import FeedEvent

NO_METRICS: Final = "none; agent.report(accuracy=...) in the script gives some"
EPOCH_COLUMNS: Final = ("epoch", "step", "batch", "lr", "samples/s", "loss", "metrics")
WAITS: Final = "waits"  # outcome of the last decision about a job without slots
LAST_GROUPS: Final = 20
LAST_EPOCHS: Final = 10


def print_job(detail: JobDetail) -> None:
    """Print everything about one job: spec, history, workers, groups and epochs."""
    job, out = detail.summary, sys.stdout.write
    out(f"{job.job}  {job.state}: {job.reason.removeprefix(f'{job.state}: ')}\n\n")
    for name, value in _facts(detail).items():
        out(f"  {name:10s} {value}\n")
    for note in detail.notes:
        out(f"  {'note':10s} {note}\n")
    out("\nhistory\n")
    sys.stdout.writelines(f"{line}\n" for line in history_lines(detail, width_of(sys.stdout)))
    if len(detail.promises) > 1:
        _section(["said", "done by"], [(second(p.time), second(p.end)) for p in detail.promises])
    if detail.workers:
        _section(["rank", "node", "slot", "pid", "group", "batch", "phase"], _workers(detail))
    if len(detail.versions) > 1:
        _section(["group", "ordered", "what", "slots", "batch", "outcome", "took"], _groups(detail))
    if detail.epochs:
        _section(EPOCH_COLUMNS, _epochs(detail))
        for epoch in detail.epochs[-LAST_EPOCHS:]:
            if epoch.left_early:
                of = f"{epoch.trained_samples} of {epoch.epoch_samples} samples"
                out(f"epoch {epoch.epoch}: {of} (the script left its loop)\n")
        last = detail.epochs[-1]
        if last.train_loss is None and detail.spec.stated_sweep is None:
            problem = "no finite loss: nan, or backward() was not called"
            out(f"epoch {last.epoch}: {problem}; see `ones logs {job.job}`\n")


def print_decisions(
    explanation: Explanation, search: SearchInfo, *, numbers: bool, end: str = ""
) -> None:
    """Print every decision about a job with its reason, and the accuracy of the scheduler.

    If `numbers` is True, the numbers that led to each decision are printed, too. `end` is the
    reason why the job ended.
    """
    rows = [
        [
            moment(d.time)[11:19],
            _size(d.before),
            _size(d.to),
            d.by,
            _outcome(d),
            _reason(d),
            *([" ".join(f"{k}={v:.4g}" for k, v in d.numbers.items())] if numbers else []),
        ]
        for d in explanation.decisions
    ]
    sys.stdout.write(f"{explanation.job}  {explanation.state}{f': {end}' if end else ''}\n")
    for note in explanation.notes:
        sys.stdout.write(f"  {'note':10s} {note}\n")
    sys.stdout.write("\n")
    columns = ["time", "from", "to", "by", "outcome", "why"]
    print_table([*columns, "numbers"] if numbers else columns, rows)
    if facts := search_facts(search):
        sys.stdout.write("\nthe scheduler, over all jobs\n")
        sys.stdout.writelines(f"  {name:12s} {fact}\n" for name, fact in facts.items())


def _outcome(decision: Decision) -> str:
    if decision.outcome == WAITS:
        return f"waits {span(decision.took_s)}"
    return decision.outcome or "under way"


def _reason(decision: Decision) -> str:
    """Return why, with the time of the reason if it may change while the job waits."""
    if decision.outcome != WAITS:
        return decision.reason
    return f"{decision.reason} (at {moment(decision.time + decision.took_s)[11:19]})"


def search_facts(search: SearchInfo) -> dict[str, str]:
    """Describe the scheduler's changes so far, its search, and the errors of its predictions."""
    found = {"changes": f"{search.rescales} of slots, {search.batch_changes} of the batch alone"}
    if search.predicted_gain is not None and search.realised_gain is not None:
        text = f"measured {search.realised_gain:.2f} x, expected {search.predicted_gain:.2f} x"
        error = search.gain_error
        found["speed-up"] = text if error is None else f"{text}; off by {error:.2f} x each"
    if search.length_error is not None and search.length_coverage_80 is not None:
        found["work left"] = (
            f"off by {search.length_error:.0%}; {search.length_coverage_80:.0%} within "
            "the interval that is meant for 80%"
        )
    if search.generations:
        found["search"] = (
            f"{search.generations} generations, fitness {search.best_fitness:.3g} "
            f"(mean {search.mean_fitness:.3g}), diversity {search.diversity:.2f}, "
            f"{search.decision_ms:.1f} ms a decision"
        )
    return found


def _size(size: Size) -> str:
    if not size.slots:
        return "waits"
    count = len(size.slots)
    return f"{count} slot{'s' * (count != 1)}, batch {size.batch}"


def history_lines(detail: JobDetail, width: int | None) -> Iterator[str]:
    """Yield a line for each day, followed by the state changes of that day.

    Long lines are wrapped at `width` columns; None disables wrapping.
    """
    day = ""
    for change in detail.history:
        date, _, time = second(change.time).partition("T")
        if date != day:
            yield f"  {date}"
            day = date
        line = f"  {time}  {change.from_state} -> {change.to_state}: {change.reason}"
        indent = " " * (len(time) + 4)
        yield from [line] if width is None else textwrap.wrap(line, width, subsequent_indent=indent)


def _section(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()
    print_table(columns, rows)


def _facts(detail: JobDetail) -> dict[str, object]:
    job = detail.summary
    no_metrics = NO_METRICS if detail.spec.stated_sweep is None else "none yet"
    metrics = ", ".join(f"{k} {v:.4g}" for k, v in job.metrics.items()) or no_metrics
    return {
        "user": job.user,
        "submitted": moment(job.submitted_at),
        **_relations(detail.spec),
        **_training(detail),
        "workdir": f"{detail.spec.workdir} (snapshot {detail.snapshot[:12]})",
        **({} if detail.spec.rigid else {"samples": detail.samples_done, "metrics": metrics}),
        **({"uses": use} if (use := use_in_words(job)) else {}),
        "waited": span(job.queued_s),
        "ran": span(job.running_s),
        **({"promised": promised} if (promised := describe_promise(job)) else {}),
        "failures": f"{detail.failures}, {detail.spec.retries} retries allowed",
        "when lost": _when_lost(detail),
        **({} if detail.exit_code is None else {"exit code": detail.exit_code}),
    }


def _relations(spec: JobSpec) -> dict[str, object]:
    found: dict[str, object] = {}
    if spec.after:
        found["after"] = ", ".join(spec.after)
    if spec.array:
        found["array"] = spec.array
    return found


def _when_lost(detail: JobDetail) -> str:
    if detail.spec.stated_sweep is not None:
        return "finished units are kept"
    if detail.spec.fails_on_loss:
        return "fails"
    return "begins again" if detail.spec.rigid else "starts again from its last epoch"


def _training(detail: JobDetail) -> dict[str, object]:
    job, sweep = detail.summary, detail.spec.stated_sweep
    if detail.spec.rigid:
        return {"kind": detail.spec.kind, "command": command_line(detail.spec.argv)}
    if sweep is None:
        return {
            "script": " ".join((detail.spec.script, *detail.spec.args)),
            "batch": _batch(detail),
            "lr": "the script's" if job.lr is None else f"{job.lr:g}",
            "epochs": _epochs_done(detail),
        }
    kind = type(sweep.search.searcher).__struct_config__.tag
    return {
        "sweep": f"{kind} over {', '.join(sweep.search.space)}: `ones sweep show {job.job}`",
        "goal": f"{sweep.search.mode} of {sweep.search.metric}",
        "functions": " ".join(filter(None, (sweep.model_fn, sweep.train_fn, sweep.eval_fn))),
    }


def _epochs_done(detail: JobDetail) -> str:
    total, stop = detail.epochs_total, detail.spec.stop
    most = "at most " if stop is not None and stop.metric is not None else ""
    return f"{detail.summary.epoch}{f' of {most}{total}' if total else ''} finished"


def _batch(detail: JobDetail) -> str:
    spec, now = detail.spec, detail.summary.global_batch
    limit = spec.batch_limit if detail.batch_limit is None else detail.batch_limit
    text = f"{now or spec.batch_size}, at most {limit}"
    return f"{text} for now (max_batch_size is auto)" if spec.batch_limit_is_auto else text


def _workers(detail: JobDetail) -> list[tuple[object, ...]]:
    return [
        (w.rank, w.node, w.slot, w.pid or "", f"v{w.version}", w.local_batch, w.phase)
        for w in detail.workers
    ]


def _groups(detail: JobDetail) -> list[tuple[object, ...]]:
    return [
        (
            f"v{v.version}",
            second(v.time),
            v.kind,
            len(v.slots),
            v.global_batch or "",
            v.outcome or "under way",
            f"{v.took_s:.2f} s" if v.outcome else "",
        )
        for v in detail.versions[-LAST_GROUPS:]
    ]


def _epochs(detail: JobDetail) -> list[tuple[object, ...]]:
    return [
        (
            e.epoch,
            e.step,
            e.global_batch,
            f"{e.lr:g}",
            f"{e.samples_per_s:.0f}",
            "" if e.train_loss is None else f"{e.train_loss:.4g}",
            ", ".join(f"{k} {v:.4g}" for k, v in e.metrics.items()),
        )
        for e in detail.epochs[-LAST_EPOCHS:]
    ]


def show(job: JobName, *, common: Common = COMMON) -> None:
    """Show everything about JOB: its spec, workers, history and epochs."""
    with BlockingClient(common.home) as client:
        detail = client.job(job)
    if common.in_json:
        flat = plain(detail)
        print_data({**flat.pop("summary"), **flat}, common.output)
    else:
        print_job(detail)


def explain(
    job: JobName,
    *,
    numbers: Annotated[bool, Parameter(help="also print the numbers behind each decision")] = False,
    common: Common = COMMON,
) -> None:
    """Explain the slots and the batch of JOB: every decision and its reason."""
    with BlockingClient(common.home) as client:
        explanation = client.explain(job)
        search = client.search()
        ended = explanation.state in ENDED and not common.in_json
        end = client.job(job).summary.reason if ended else ""
    if common.in_json:
        document = {**plain(explanation), "search": search}
        say(common, document, rows=explanation.decisions)
    else:
        print_decisions(explanation, search, numbers=numbers, end=end)


def resize(
    job: JobName,
    *,
    slots: Annotated[int | None, Parameter(help="number of slots; 0 pauses the job")] = None,
    batch: Annotated[int | None, Parameter(help="global batch size, samples per step")] = None,
    on: Annotated[list[str] | None, Parameter(help="exactly these slots, NODE/INDEX")] = None,
    auto: Annotated[bool, Parameter(help="return the job to the policy's control")] = False,
    common: Common = COMMON,
) -> None:
    """Change the size of JOB while it trains; the policy will not change it until --auto."""
    if auto and not (slots is None and batch is None and on is None):
        problem = "--auto returns the job to the policy, which chooses its size"
        raise BadFieldError(problem, "omit --slots, --batch and --on, or omit --auto", "auto")
    with BlockingClient(common.home) as client:
        done = client.resume(job, auto=True) if auto else client.resize(job, slots, batch, on or ())
        _moved(client, done, common)


def pause(job: JobName, *, common: Common = COMMON) -> None:
    """Release the slots of JOB; after `resume`, the job continues from the same step."""
    with BlockingClient(common.home) as client:
        _moved(client, client.pause(job), common)


def resume(job: JobName, *, auto: bool = False, common: Common = COMMON) -> None:
    """End a pause of JOB; with --auto, return the job to the policy's control."""
    with BlockingClient(common.home) as client:
        _moved(client, client.resume(job, auto=auto), common)


def samples(job: JobName, *, common: Common = COMMON) -> None:
    """Print the samples of each committed step of JOB. The job file must set record_samples."""
    with BlockingClient(common.home) as client:
        print_data(client.samples(job), "json" if common.output == "json" else "jsonl")


def events(
    *,
    from_: Annotated[int, Parameter(name="--from", help="first sequence number")] = 1,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="continue until Ctrl-C")
    ] = False,
    common: Common = COMMON,
) -> None:
    """Print the events of the cluster from the journal, without gaps."""
    if follow and common.output == "json":
        problem = "-o json prints one document, but --follow never ends"
        raise BadFieldError(problem, "use -o jsonl, one document per line", "output")
    with BlockingClient(common.home) as client:
        if follow:
            warn_if_absent(client)
        found = report_gaps(client.events(from_, follow=follow), from_)
        if common.in_json:
            print_data(
                (
                    {**e.detail, "seq": e.seq, "time": e.time, "type": e.event, "job": e.job,
                     "node": e.node}
                    for e in found
                ),
                common.output,
            )  # fmt: skip
            return
        for event in found:
            detail = " ".join(f"{k}={v}" for k, v in event.detail.items() if v is not None)
            who = event.job or event.node or "cluster"
            sys.stdout.write(
                f"{event.seq:6d} {moment(event.time)} {event.event:16s} {who} {detail}\n"
            )
            sys.stdout.flush()


def report_gaps(events: Iterable[FeedEvent], first: int) -> Iterator[FeedEvent]:
    """Yield the events, and print a line to stderr for each range of deleted events.

    `first` is the number of the first requested event; numbers start at 1.
    """
    expected = max(1, first)
    for event in events:
        if event.seq > expected:
            sys.stderr.write(
                f"ones: events {expected} to {event.seq - 1} are no longer kept "
                "(keep_events_s, keep_bytes)\n"
            )
        expected = event.seq + 1
        yield event


def warn_if_absent(client: BlockingClient) -> None:
    """Print a warning if the controller does not reply; later requests are retried for a minute."""
    try:
        client.cluster()
    except UnreachableError as error:
        sys.stderr.write(f"ones: {error}; retrying for a minute\n")


def _moved(client: BlockingClient, detail: JobDetail, common: Common) -> None:
    job = detail.summary
    row = {"job": job.job, "state": job.state, "reason": job.reason, "slots": job.slots}
    lines = [f"{job.job} {job.state}: {job.reason}"]
    if common.output == "table" and job.state == "rescaling":
        last = client.explain(job.job).decisions[-1:]
        if last and last[0].outcome == "ordered":  # the first line shows the old size
            lines.append(f"{job.job}: {last[0].reason}; starts after the current change")
    say(common, row, *lines)

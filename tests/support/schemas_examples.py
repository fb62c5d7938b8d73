"""One message of every tag with every field set: what the golden bytes are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec

from schemas import nodes
from schemas.codec import CODECS, tag_of
from schemas.epochs import EpochFacts, StepTimes
from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, SlotId, Term, Version, WorkerId
from schemas.jobs import EndWarning, JobSpec, StopRule, Utility
from schemas.nodes import Group, Member, NodeSpec, ResumePoint, SlotSpec
from schemas.relations import ArrayElement
from schemas.sharing import PriorityClass, Project, Sharing, UserLimits, UserShare
from schemas.sweeps import Asha, Parameter, SearchSpec, SweepSpec, TrialSpec, Value
from schemas.wire import Message, agent, client, feed, files, standby, streams, sweeps, worker

JOB: Final = JobId("digits-7")
NODE: Final = NodeId("agent-1")
SLOT: Final = SlotId("agent-1/2")
BOOT: Final = BootId("0f3c9a")
VERSION: Final = Version(5)
RANK: Final = Rank(1)
TERM: Final = Term(3)
DIGEST: Final = "9f86d081884c7d65"
NOTE: Final = "no utility stated: it counts 1"

SWEEP: Final = SweepSpec(
    search=SearchSpec(
        space={
            "lr": Parameter(
                choice=("sgd", 2, 0.5, True), uniform=(0.0, 0.99), log_uniform=(1e-4, 0.1),
                integer=(16, 256), log_integer=(1, 64), when={"optimizer": ("sgd", 1)},
            ),
        },
        searcher=Asha(configurations=24, min_epochs=2, eta=3), epochs=18, metric="accuracy",
        mode="max", seed=7,
    ),
    input_fn="data:load", model_fn="models:build", train_fn="models:train",
    eval_fn="models:evaluate", partitions=8, replicas=2, keep=3, order="rollouts", revoke_s=30.0,
    graduate_batch=64,
)  # fmt: skip
VALUES: Final[dict[str, Value]] = {"lr": 0.01, "optimizer": "adam", "width": 64, "bias": True}
STOP: Final = StopRule(
    epochs=40, samples=1_000_000, metric="accuracy", at_least=0.97, consecutive=10, plateau=5
)
TRIAL: Final = TrialSpec(
    sweep=JobId("search-4"), trial=3, values={"lr": 0.1, "model": "resnet18"},
    functions={"input_fn": "data:load", "model_fn": "models:build", "train_fn": "models:train"},
    partitions=8, seed=7, epochs=9, epochs_done=3, version=24, digest="9f86d081" * 8,
    sources=("10.0.0.7:29411", "10.0.0.8:29411"), states_key="8f0c2d",
)  # fmt: skip
SPEC: Final = JobSpec(
    name="digits", kind="elastic", script="train.py", command=("python", "train.py"),
    batch_size=64, args=("--width", "64"), grace_s=60.0, project="vision",
    job_class="urgent",
    workdir="/home/ada/digits", max_batch_size=2048, max_local_batch=512, lr=0.05, slots=(2, 8),
    family="digits-wide", slots_wanted=4, priority=2.0, python="/opt/venv/bin/python",
    record_samples=True, stop=STOP, retries=1, max_run_s=3600.0,
    progress_deadline_s=600.0, seed=11,
    utility=Utility(value=80.0, deadline_s=3600.0, decay=0.25), env={"OMP_NUM_THREADS": "1"},
    sweep=SWEEP, trial=TRIAL, not_before="2026-12-01T08:00Z",
    deadline="+30d", warn=EndWarning(before_s=90.0, signal="HUP", to="others"),
    after=("ok:prepare-3",), array="0-9%3", labels={"team": "vision"}, element=ArrayElement(array=JobId("grid-3"), index=4),
    gpu_type="a100", constraints={"zone": "a"}, exclusive=True, cpus=4.0, memory_bytes=1 << 34,
)  # fmt: skip
GROUP: Final = Group(
    version=VERSION,
    members=(
        Member(
            rank=Rank(0), slot=SlotId("agent-1/0"), local_batch=32,
            worker=WorkerId("digits-7.v3.r0"),
        ),
        Member(rank=RANK, slot=SLOT, local_batch=32, worker=WorkerId("digits-7.v5.r1")),
    ),
    lr=0.05, base_batch=64, resume=ResumePoint(epoch=12, version=Version(4)),
)  # fmt: skip
FORMER: Final = (
    Member(rank=RANK, slot=SlotId("agent-1/3"), local_batch=32, worker=WorkerId("digits-7.v3.r1")),
)
SHOWN: Final = "4f6e"
STORE: Final = "10.0.0.7:29400"
NODE_SPEC: Final = NodeSpec(
    node=NODE, host="ash", address="10.0.0.7",
    slots=(SlotSpec(index=2, kind="gpu", model="H200", memory_bytes=141 << 30, uuid="GPU-1f"),),
    cores=16, memory_bytes=128 << 30, release="0.1.0", fenced_s=32.0, states_port=7706,
    containers="podman", environments=False,
    labels={"zone": "a"}, place_cores=1.5, place_memory_bytes=8 << 30,
)  # fmt: skip
STATE: Final = sweeps.StateRef(trial=4, version=11, digest=DIGEST)
SOURCE: Final = sweeps.StateSource(node=NODE, address="10.0.0.7:7706")
UNIT: Final = sweeps.UnitOrder(
    attempt=37, worker=WorkerId("digits-7.v5.r1"), trial=4, values=VALUES, state=STATE,
    sources=(SOURCE,), result=sweeps.StateRef(trial=9, version=12, digest=DIGEST), epoch=2,
    partition=3, evaluate=True,
)  # fmt: skip

SHARING: Final = Sharing(
    revision=3, fair_share=False, half_life_s=3600.0, turn_s=60.0,
    projects={
        "vision": Project(
            weight=2.0, guaranteed=4, limit=8, users={"ada": UserShare(weight=3.0, limit=2)}
        )
    },
    user_limits=UserLimits(running=10, queued=100, slots=16, submissions_per_minute=60),
    users={"ada": UserLimits(running=20, queued=200, slots=32, submissions_per_minute=120)},
    classes={
        "urgent": PriorityClass(
            rank=10, roles=("admin",), users=("ada",), projects=("vision",), limit=4, preempts=True
        )
    },
)  # fmt: skip
_SHARE: Final = client.AccountShare(
    project="vision", user="ada", slots=2, running=1, waiting=3, budget=2, usage_s=7200.0
)
JOURNAL: Final = "0123456789abcdef"
_RANK: Final[dict[str, Any]] = {"job": JOB, "version": VERSION, "rank": RANK}
_WORKER: Final[dict[str, Any]] = {**_RANK, "journal": JOURNAL}
_STARTED: Final = agent.WorkerStarted(**_WORKER, pid=4711, started_ticks=88_123)
_STEP_TIMES: Final = StepTimes(pass_s=0.0125, sync_s=0.0025, local_batch=16, passes=2)
_STEPS: Final = agent.StepsReported(
    **_WORKER, group=VERSION, epoch=13, step=340, samples_done=21_760, samples_per_s=1800.5,
    train_loss=0.25, global_batch=64, lr=0.05, noise_scale=512.5, cpu_cores=1.75,
    sent_bytes_per_s=2.5e8, group_steps=120, step_times=_STEP_TIMES,
)  # fmt: skip
_USED: Final = agent.WorkerUsed(
    **_WORKER, cpu_cores=1.5, memory_bytes=3 << 30, gpu_share=0.87, gpu_memory_bytes=30 << 30
)
_STALL: Final = agent.WorkerStalled(
    **_WORKER, group=VERSION, step=340, idle_s=42.5, waits_s=41.25, at="train.py:17 in evaluate"
)
_NUMBERED: Final = agent.Numbered(node=NODE, boot=BOOT, seq=300, event=_STARTED)
_SEEN: Final = agent.WorkerSeen(
    **_WORKER, slot=2, pid=4711, started_ticks=88_123, ended=True, code=1, signal=9
)
_USAGE: Final = client.JobUsage(job=JOB, user="ann", project="vision", slot_s=7200.5)
_SUMMARY: Final = client.JobSummary(
    job=JOB, name="digits", user="ada", state="running", reason="ONES chose 2 slots", slots=2,
    global_batch=64, lr=0.05, epoch=12, samples_per_s=1800.5, progress=0.5, train_loss=0.25,
    metrics={"accuracy": 0.875}, submitted_at=Seconds(1_760_000_000.5), queued_s=Seconds(3.5),
    running_s=Seconds(61.25), rescales=2, batch_changes=1, ended_at=Seconds(1_760_000_065.25),
    promised_end=Seconds(1_760_000_100.5), expected_end=Seconds(1_760_000_070.25),
    predicted_loss=0.125, project="vision", labels={"team": "vision"}, exit_code=3, slot_s=122.5,
    cpu_cores=1.5, memory_bytes=3 << 30, gpu_share=0.875, gpu_memory_bytes=30 << 30, kind="command",
    start_at=Seconds(1_760_000_600.5), start_earliest=Seconds(1_760_000_300.5),
    start_latest=Seconds(1_760_000_900.5), code="waits", min_slots=1,
)  # fmt: skip
_KEY: Final = client.KeyInfo(
    public="p" * 40, name="ann", role="user", projects=("vision",),
    expires=Seconds(2_000_000_000.5), state="revoked", kept="file", by="root",
    at=Seconds(1_760_000_000.5),
)  # fmt: skip
_START: Final = client.ExpectedStart(
    starts="later",
    at=Seconds(1_760_000_600.5),
    earliest=Seconds(1_760_000_300.5),
    latest=Seconds(1_760_000_900.5),
    ahead=1,
    reason="why",
    after="a-1",
    after_ends_at=Seconds(1_760_000_590.25),
)
_PROMISE: Final = client.PromiseInfo(time=Seconds(1_760_000_004.5), end=Seconds(1_760_000_100.5))
_TRIAL: Final = client.TrialInfo(
    number=9, values=VALUES, state="training", reason="promoted", parent=4, graduated_as=JOB, epochs=2,
    granted=6, start_epochs=1, partition=3, slot=SLOT, partitions_left=5, metrics=({"accuracy": 0.75, "loss": 0.5},),
    ended_at=(Seconds(1_760_000_030.5),), state_bytes=4096, first_epoch=2, best_score=0.75,
    best_epoch=2,
)  # fmt: skip
_LEDGER_UNIT: Final = client.LedgerUnit(
    trial=9, values_of=4, version=12, epoch=2, partition=3, digest=DIGEST, node=NODE, slot=SLOT,
    ended=Seconds(1_760_000_031.5), seconds=5.25, metrics={"loss": 0.5}, samples=180,
)  # fmt: skip
_WORKER_INFO: Final = client.WorkerInfo(
    rank=RANK, node=NODE, slot=SLOT, pid=4711, version=VERSION, phase="training", local_batch=32,
    worker=WorkerId("digits-7.v5.r1"), step=336,
)  # fmt: skip
_CHANGE: Final = client.Change(
    time=Seconds(1_760_000_004.5), from_state="queued", to_state="starting", reason="2 slots are free",
    detail={"slots": 2, "lr": 0.05, "first": True, "by": "fifo", "before": None},
)  # fmt: skip
_EPOCH_INFO: Final = client.EpochInfo(
    epoch=12, time=Seconds(1_760_000_060.5), step=336, global_batch=64, lr=0.05,
    samples_per_s=1800.5, train_loss=0.25, metrics={"accuracy": 0.875}, slots=2, nodes=1,
    whole=True, noise_scale=512.5, samples_done=19_840, epoch_samples=1797, trained_samples=1024,
    left_early=True, beside=((1, ("language",)), (2, ("digits", "language"))),
    step_times=_STEP_TIMES,
)  # fmt: skip
_SIZE: Final = client.Size(slots=(SlotId("agent-1/0"), SLOT), batch=64)
_DECISION: Final = client.Decision(
    time=Seconds(1_760_000_070.5), before=client.Size(slots=(SlotId("agent-1/0"),), batch=32),
    to=_SIZE, reason="2 slots are worth it", code="grow", by="operator",
    numbers={"speed_now": 1000.5, "speed_then": 1800.5}, version=VERSION, outcome="formed",
    took_s=0.25,
)  # fmt: skip
_VERSION_INFO: Final = client.VersionInfo(
    version=VERSION, resumed_epoch=12, kind=agent.JOIN, resumed_step=340,
    time=Seconds(1_760_000_070.5), slots=(SlotId("agent-1/0"), SLOT), global_batch=64,
    outcome="formed", took_s=0.25,
)  # fmt: skip
_RESERVATION: Final = nodes.Reservation(
    begin=Seconds(1_760_003_600.0), end=Seconds(1_760_007_200.0), reason="course",
    projects=("vision",), users=("eve",), user="ann", id="r-3",
)  # fmt: skip
_NODE_INFO: Final = client.NodeInfo(
    node=NODE, state="up", reason="greeted", host="ash", address="10.0.0.7", slots=4, free=2,
    kind="gpu", model="H200", jobs=(JOB,), release="0.1.0", labels={"zone": "a"}, cores=16,
    memory_bytes=128 << 30, reservations=(_RESERVATION,),
)  # fmt: skip
_FEED_EVENT: Final = feed.FeedEvent(
    seq=70_000, time=Seconds(1_760_000_000.5), event="job.submitted", job=JOB, node=NODE,
    detail={"user": "ada", "batch_size": 64, "lr": 0.05, "resumed": False, "python": None},
)  # fmt: skip
_FILE: Final = files.FileInfo(area="work", path="out/plot.png", size=2048, stamp="7-1-2048")
_PIECE: Final = feed.LogPiece(
    version=VERSION, rank=RANK, offset=512, data=b"epoch 12\n", time=1.75e9, node="n1"
)

_OF_WORKERS: Final = (
    _STARTED,
    agent.WorkerReady(
        **_WORKER, index=1, epoch_samples=1437, resumed_epoch=12, parameters=4810,
        store_port=29_400, data_digest="1437-9f86d081884c7d65", imports_s=1.5,
    ),
    agent.SlotAwaited(**_WORKER, index=1),
    agent.StoreOpened(**_WORKER, index=2, group=VERSION, port=29_401),
    agent.GroupFormed(
        **_WORKER, index=2, group=VERSION, epoch=12, step=336, pause_ms=1.25, step_ms=40.0, connect_ms=2.5,
    ),
    agent.JoinFailed(**_WORKER, index=3, group=VERSION, error="the store closed"),
    agent.GroupBroken(**_WORKER, index=3, group=VERSION, error="connection reset by peer"),
    agent.Quiesced(**_WORKER, index=4, group=VERSION, step=341, epoch=12, has_full_state=True, port=29_402),
    agent.Suspended(**_WORKER, index=5, group=VERSION, epoch=12, step=345, samples_done=21_800),
    agent.EpochReported(
        **_WORKER,
        index=3,
        group=VERSION,
        stated_epochs=40,
        duration_s=0.75,
        facts=EpochFacts(
            epoch=13,
            step=364,
            samples_done=18_681,
            epoch_samples=1437,
            samples_per_s=1800.5,
            train_loss=0.25,
            metrics={"accuracy": 0.875},
            global_batch=64,
            lr=0.05,
            noise_scale=512.5,
            trained_samples=1024,
            left_early=True,
            loss_is_not_finite=True,
            step_times=_STEP_TIMES,
        ),
    ),
    agent.TrainingFinished(**_WORKER, index=4, reason="40 epochs are done"),
    agent.SweepWorkerReady(**_WORKER, index=2, address="10.0.0.7:41007"),
    agent.UnitStarted(**_WORKER, index=3, attempt=37, samples=180, waited_s=0.25, staged_s=1.5),
    agent.UnitEnded(
        **_WORKER, index=4, attempt=37, metrics={"loss": 0.5}, samples=180, seconds=5.25,
        scores={"accuracy": 0.75}, digest=DIGEST, size=4096,
    ),
    agent.UnitFailed(**_WORKER, index=5, attempt=37, reason="loss is nan", fault="trial"),
    agent.ScriptFailed(
        **_WORKER, index=5, error="ValueError: no data", where="train.py:31", refused=True,
    ),
    agent.WorkerExited(
        **_WORKER, code=1, signal=9, unseen=True, memory_limit=2 << 30, disk_limit=3 << 30,
        asked=True,
    ),
    agent.WorkerRefused(
        **_WORKER, error="no such interpreter", hint="correct `python`", node_fault=True,
    ),
    agent.NodeHealth(problems=("/var/lib/ones is full; free space on it",)),
    agent.NodeNoticed(within_s=30.0, reason="/run/ones/notice appeared"),
    agent.JobCleared(job=JOB, version=VERSION),
    sweeps.StateCopied(job=JOB, trial=4, version=11),
    sweeps.StateNotCopied(job=JOB, trial=4, version=11, reason="no space left on device"),
    _STEPS,
    _STALL,
)  # fmt: skip
_OF_AGENTS: Final = (
    _NUMBERED,
    agent.Telemetry(node=NODE, steps=_STEPS),
    agent.StallTelemetry(node=NODE, stall=_STALL),
    _USED,
    agent.UsageTelemetry(node=NODE, used=_USED),
    _SEEN,
    agent.Hello(
        node=NODE, boot=BOOT, spec=NODE_SPEC, workers=(_SEEN,), events_sent=300, events_dropped=298,
        problems=("/var/lib/ones is full; free space on it",), echo="3.2", jobs=(JOB,),
        run_id="5f2c8d0e91ab", term=TERM, highest_job=57,
    ),
    agent.Welcome(
        session="3.1", boot=BOOT, term=TERM, committed=299, log_port=7704, event_port=7700,
        report_again=True, heartbeat_s=1.5, events_here=True,
    ),
    agent.Refused(code="no_slots", message="the node offers no slots", hint="set slots"),
    agent.Heartbeat(session="3.1", events_sent=300, number=12),
    agent.HeartbeatAck(session="3.1", term=TERM, committed=299, number=12),
    agent.HelloRequest(term=TERM, echo="3.2"),
    agent.NextServerKey(public="a" * 40),
    agent.EventsCommitted(boot=BOOT, through=299, term=TERM),
    agent.ResendEvents(boot=BOOT, first=300),
    agent.Resent(events=(_NUMBERED,)),
    agent.GroupDelta(
        job=JOB, term=TERM, version=VERSION, stage=agent.SWITCH, group=GROUP, spec=SPEC,
        snapshot=DIGEST, forget=True, kind=agent.RECOVER, former=FORMER, store=STORE, source=RANK,
        user="ann", journal=JOURNAL, secrets={"TOKEN": "hunter2"},
    ),
    agent.DeltaAcked(job=JOB, term=TERM, version=VERSION, stage=agent.SWITCH, applied=True),
    sweeps.SweepDelta(
        job=JOB, term=TERM, revision=52, attempts=40, units=(UNIT,),
        wanted=(sweeps.WantedState(state=STATE, sources=(SOURCE,)),), journal="0123456789abcdef",
        states_key="8f0c2d",
    ),
    sweeps.SweepDeltaAcked(job=JOB, term=TERM, revision=52),
)  # fmt: skip
_OF_CLIENTS: Final = (
    client.GetCluster(),
    client.PutSnapshot(digest=DIGEST, offset=1024, data=b"\x1f\x8b\x00\xff", total=2048),
    client.SubmitJob(
        spec=SPEC, snapshot=DIGEST, key="once", project="vision", secrets={"TOKEN": "hunter2"}
    ),
    client.CheckJob(spec=SPEC, when=True, project="vision"),
    client.CancelJob(job=JOB),
    client.ResizeJob(job=JOB, slots=2, batch=128, on=(SlotId("agent-1/0"), SLOT)),
    client.PauseJob(job=JOB),
    client.ResumeJob(job=JOB, auto=True),
    client.HoldJob(job=JOB),
    client.ReleaseJob(job=JOB),
    client.RerunJob(job=JOB, key="again", secrets={"TOKEN": "hunter2"}),
    client.ListJobs(
        ended=True, states=("running", "failed"), user="ann", name="lr-*", cursor="jobs.9",
        labels={"team": "vision"}, older_s=7200.0, newest_first=True, limit=50,
    ),
    client.GetUsage(since=Seconds(1.5e9), until=Seconds(1.6e9), cursor="jobs.9"),
    client.GetJob(job=JOB, wait_s=10.5, cursor="epochs.9"),
    client.WaitJob(job=JOB, wait_s=10.5, failures=1),
    client.ExplainJob(job=JOB, cursor="decisions.9"),
    client.GetSearch(),
    client.ListNodes(cursor="nodes.9"),
    client.GetSharing(),
    client.ChangeSharing(sharing=SHARING, based_on=3),
    client.PauseScheduling(paused=True, reason="new switch"),
    client.GetPolicy(),
    client.ChoosePolicy(name="tiresias", options='{"limits":[60.0]}'),
    client.DrainNode(node=NODE, reason="new kernel", within_s=600.0, cordon=True),
    client.UndrainNode(node=NODE),
    client.ReserveNodes(nodes=(NODE,), reservation=_RESERVATION),
    client.CancelReservation(id="r-3"),
    client.ForgetNode(node=NODE),
    client.GetSweep(job=JOB, from_trial=500, limit=100),
    client.ChangeSweep(job=JOB, change="add", trial=3, values=VALUES, parent=4, key="once"),
    client.GetLedger(job=JOB, from_unit=2000, limit=100),
    client.ReadEvents(from_seq=70_000, limit=50, wait_s=10.5),
    client.AddKey(
        public="p" * 40, name="ann", role="user", projects=("vision",), expires=Seconds(2e9),
    ),
    client.ListKeys(cursor="keys.9"),
    client.RevokeKey(key="ann"),
    _KEY,
    client.Keys(keys=(_KEY,), next="keys.9"),
    client.Cluster(
        release="0.1.0", term=TERM, policy="ones", user="ada", role="user", feed_port=7703,
        log_port=7705, agents_port=7701, next_key="b" * 40, last_seq=70_000, stalled="database or disk is full",
        projects=("vision", "speech"),
        topics=("project/vision/", "project/speech/", "node/", "cluster"),
        now=Seconds(1_760_000_065.25),
    ),
    client.SnapshotStored(digest=DIGEST, size=1028),
    client.JobAccepted(job=JOB, state="queued", notes=(NOTE,)),
    client.JobChecked(
        notes=(NOTE,),
        start=_START,
    ),
    _SUMMARY,
    client.Jobs(jobs=(_SUMMARY,), left_out=40, next="jobs.52"),
    _SHARE,
    client.SharingInfo(
        sharing=SHARING, slots=64, accounts=(_SHARE,), paused="paused by olga: new switch"
    ),
    client.PolicyInfo(
        name="tiresias", options='{"limits":[60.0]}', by="root", since=Seconds(1.5e9), in_file="ones"
    ),
    _USAGE,
    client.Usage(since=Seconds(1.5e9), until=Seconds(1.6e9), jobs=(_USAGE,), next="jobs.52"),
    client.JobState(
        job=JOB, state="failed", reason="exit code 1", exit_code=1, failures=1,
        failure="try 1 of 1 failed: exit code 1",
    ),
    _WORKER_INFO,
    _CHANGE,
    _SIZE,
    _DECISION,
    _VERSION_INFO,
    _PROMISE,
    _START,
    client.JobDetail(
        summary=_SUMMARY, spec=SPEC, snapshot=DIGEST, workers=(_WORKER_INFO,), history=(_CHANGE,),
        epochs=(_EPOCH_INFO,), versions=(_VERSION_INFO,), failures=1, exit_code=1,
        samples_done=17_244, version=VERSION, batch_limit=256, epochs_total=28, promises=(_PROMISE,), notes=(NOTE,),
        next="versions.9",
    ),
    client.Explanation(
        job=JOB, state="running", decisions=(_DECISION,), next="decisions.9",
        notes=("older records are not kept",),
    ),
    client.SearchInfo(
        policy="ones", running=True, restarts=1, plans=7, generations=300, best_fitness=0.75,
        mean_fitness=0.5, incumbent_fitness=0.625, decision_ms=12.5, rescales=4, batch_changes=2,
        predicted_gain=1.5, realised_gain=1.25, diversity=0.25, gain_error=1.2, length_error=0.15,
        length_coverage_80=0.75, length_coverage_90=0.875, planned_at=Seconds(1_760_000_000.5),
        spread=(0.25, 0.375, 0.5, 0.625, 0.75),
        planned=(client.PlannedJob(job=JOB, slots=2, batch=64, reason="grows", expected_gain=1.5),),
    ),
    client.SweepDetail(
        summary=_SUMMARY, spec=SWEEP, trials=(_TRIAL,), trials_total=24, best=9, best_score=0.75,
        units_done=90, units_repeated=1, units_left=120, unit_s=5.5,
        expected_end=Seconds(1_760_000_400.5), moved_bytes=1 << 20, waited_s=2.5, trained_s=480.5,
    ),
    client.SweepChanged(job=JOB, trial=9, state="stopped"),
    client.Ledger(job=JOB, spec=SWEEP, snapshot=DIGEST, units=(_LEDGER_UNIT,), units_total=2100),
    _NODE_INFO,
    client.Nodes(nodes=(_NODE_INFO,), next="nodes.1"),
    _FEED_EVENT,
    client.EventsPage(events=(_FEED_EVENT,), next_seq=70_001),
    client.Failed(code="bad_field", message="lr: nan", hint="give a number", field="lr"),
)  # fmt: skip
_OF_LOGS: Final = (
    feed.LogHello(node=NODE, **_WORKER, stream="log"),
    feed.LogChunk(**_WORKER, stream="log", offset=512, data=b"epoch 12\n"),
    feed.LogEnded(**_WORKER, stream="log", size=521),
    feed.LogStored(**_RANK, stream="log", size=521, ended=True, credit=1 << 20, full=True),
    feed.ReadLog(
        job=JOB, stream="samples", rank=RANK, cursor=512, max_bytes=4096, wait_s=10.5, since=1.7e9
    ),
    _PIECE,
    feed.LogPage(job=JOB, pieces=(_PIECE,), cursor=521, ended=True, missing=("r2: lost",)),
    feed.GetSnapshot(digest=DIGEST, offset=1024),
    _FILE,
    files.ListFiles(job=JOB, node=NODE),
    files.ReadFile(job=JOB, node=NODE, area="work", path="out/plot.png", offset=1024),
    files.AskFiles(request="r1", job=JOB),
    files.AskPiece(request="r2", job=JOB, area="checkpoints", path="epoch-000001.v1.pt", offset=0),
    files.FileList(request="r1", files=(_FILE,), left_out=1, refused=("link: leads outside",)),
    files.FilePiece(
        request="r2", offset=1024, data=b"\x89PNG", size=2048, stamp="7-1-2048", digest=DIGEST
    ),
    files.FilesRefused(request="r2", code="bad_field", message="no such file", hint="list them"),
    feed.SnapshotPiece(digest=DIGEST, offset=1024, data=b"\x1f\x8b\x00\xff", total=2048),
)
_STREAM: Final = "415b948495564dada81fe368229a55b7"
_OF_STREAMS: Final = (
    streams.OpenStream(
        stream=_STREAM, job=JOB, rank=RANK, what="shell", argv=("bash", "-l"), term="xterm",
        lang="C.UTF-8", rows=50, cols=132, port=6006, again=True,
        worker=WorkerId("digits-7.v5.r1"), user="ann", journal=JOURNAL,
    ),
    streams.StreamOpened(stream=_STREAM, worker=WorkerId("digits-7.v5.r1")),
    streams.StreamData(
        stream=_STREAM, offset=1024, data=b"\x1b[1mls\r\n", kept_from=512, received=40,
        limit=262_184, lost=True, ended=True,
    ),
    streams.StreamSignal(stream=_STREAM, name="INT"),
    streams.StreamClosed(stream=_STREAM, reason="the program has ended", code=7),
)  # fmt: skip
_ON_A_NODE: Final = (
    worker.ShellOrder(argv=("bash",), env={"TERM": "xterm"}, worker=4711, limit_s=28_800.0),
    worker.Assignment(
        **_WORKER, slot=2, group=GROUP, spec=SPEC, workdir="/var/ones/work/9f86",
        checkpoints="/var/ones/checkpoints/digits-7", socket="ipc:///run/ones/agent.sock",
        env={"CUDA_VISIBLE_DEVICES": "2"}, address="10.0.0.7", kind=agent.JOIN, granted=False,
        states="/var/ones/work/.states/digits-7", token=SHOWN, user="alice",
        environment="/var/ones/work/.environments/agent-9f86", python="/opt/ones/bin/python",
        container=("podman", "run"),
    ),
    worker.WorkerHello(**_RANK, pid=4711, token=SHOWN),
    worker.Reported(**_RANK, count=3),
    worker.GroupOrder(
        version=VERSION, stage=agent.SWITCH, kind=agent.RECOVER, group=GROUP, former=FORMER,
        store=STORE, source=RANK,
    ),
    worker.SlotGranted(),
    sweeps.UnitTask(unit=UNIT, states_key="8f0c2d"),
    worker.Fork(folder="/run/ones/digits-7.v5.r1", held=False),
    worker.Held(folder="/run/ones/digits-7.v5.r1", pid=4711),
    worker.LetGo(folder="/run/ones/digits-7.v5.r1", error="no such group", secrets={"A": "1"}),
    worker.Forked(folder="/run/ones/digits-7.v5.r1", pid=4711, started_ticks=88_123),
    worker.ForkFailed(folder="/run/ones/digits-7.v5.r1", error="EAGAIN"),
    worker.ZygoteReady(pid=4700, python="3.11.9", torch="2.13.0"),
    worker.ExitStatus(code=1, signal=9, at=1_760_000_061.5, max_rss_bytes=300 << 20, cpu_s=42.5),
    worker.ProcessMark(pid=4711, started_ticks=88_123),
)  # fmt: skip

_OF_STATES: Final[tuple[Message, ...]] = (
    files.AskState(job=JOB, trial=3, version=12, digest=DIGEST, offset=1 << 20, mac="8f0c2d"),
    files.StatePiece(digest=DIGEST, offset=1 << 20, total=100 << 20),
    files.StateRefused(digest=DIGEST, reason="it is not here"),
)

_ROW: Final = standby.InputRow(at=Seconds(1_760_000_000.5), body=b"\x81", crc=3_735_928_559)
_FILE: Final = standby.StoredFile(
    path="logs/digits-7.log/5.1", size=2048, mtime_ns=1_760_000_000_500
)
_OF_STANDBYS: Final = (
    standby.PullInputs(
        host="10.0.0.2", release="0.2.0+5f2e81c40a97", journal=JOURNAL, after=41, crc=77, term=TERM,
        seen=3, files=2, mirrored=True,
    ),
    _ROW,
    standby.Inputs(
        term=TERM, release="0.2.0+5f2e81c40a97", now=Seconds(1_760_000_001.5), after=41,
        rows=(_ROW,), last_event=99, copy=True, files=3, paths=("keys.json",),
    ),
    standby.PullCopy(host="10.0.0.2", offset=1 << 20),
    standby.CopyPiece(offset=1 << 20, total=3 << 20, jobs=7, data=b"SQLite"),
    standby.PullFiles(since=Seconds(1_760_000_000.5), after="keys.json"),
    _FILE,
    standby.StoredFiles(now=Seconds(1_760_000_002.5), files=(_FILE,), more=True),
    standby.PullFile(path=_FILE.path, offset=1024),
    standby.StoredPiece(
        path=_FILE.path, offset=1024, total=2048, mtime_ns=_FILE.mtime_ns, data=b"epoch 1"
    ),
)  # fmt: skip

EXAMPLES: Final[dict[str, Message]] = {
    tag_of(type(message)): message
    for message in (
        *_OF_WORKERS,
        *_OF_AGENTS,
        *_OF_CLIENTS,
        *_OF_LOGS,
        *_OF_STREAMS,
        *_ON_A_NODE,
        *_OF_STATES,
        *_OF_STANDBYS,
    )
}


def kinds_on_the_wire() -> dict[str, type[Message]]:
    """Every tagged message that a codec can meet, also deep inside another one."""
    found: dict[type[msgspec.Struct], None] = {}
    for codec in CODECS:
        for kind in codec.kinds:
            _collect(kind, found)
    return {tag_of(kind): kind for kind in found if issubclass(kind, Message)}


def _collect(annotation: object, found: dict[type[msgspec.Struct], None]) -> None:
    for kind in structs_in(annotation):
        if kind not in found:
            found[kind] = None
            for field in msgspec.structs.fields(kind):
                _collect(field.type, found)


def structs_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    if inner := get_args(annotation):
        for argument in inner:
            yield from structs_in(argument)
    elif isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation

"""A job as its user describes it (program, batch, slots, stop rule), and checks of job files.

An *elastic* job is a script that uses the library; its slots change while it trains. *Rigid* jobs
run any program on a fixed number of slots: `torchrun` runs it once on each slot, `command` once,
`interactive` once, on a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

import msgspec

from schemas.errors import BadFieldError, SettingsError
from schemas.ids import Seconds
from schemas.relations import (
    ArrayElement,
    ArrayRange,
    Parent,
    check_labels,
    parents_in,
    range_of,
    stated_time,
)
from schemas.sweeps import MAX_EPOCHS, MAX_METRIC, SweepSpec, TrialSpec, check_sweep, is_metric

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STATES: Final = (
    "queued", "starting", "running", "rescaling", "paused", "succeeded", "failed", "cancelled",
    "rejected",
)  # fmt: skip
ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "rejected"})
MAX_ARRAY_NAME: Final = 38  # leaves room for an index
MAX_BATCH: Final = 2**40  # samples
MAX_SAMPLES: Final = 2**53  # larger integers are not exact in a float
MAX_SLOTS: Final = 65_536
if TYPE_CHECKING:
    Slots = tuple[int, int]
else:
    Slots = tuple[int, int] | int  # a single number is accepted; `JobSpec` stores (least, most)
Kind = Literal["elastic", "torchrun", "command", "interactive"]
SWEEP_SCRIPT: Final = "sweep"  # `script` of a job that is a sweep
KEEP: Final = "keep"  # `max_batch_size`: keep the batch of the job file
AUTO: Final = "auto"  # `max_batch_size`: the cluster chooses
MAX_ARGS: Final = 4096
MAX_VARIABLES: Final = 4096
MAX_SECRET_BYTES: Final = 32_768  # of all secrets of a job, with their names
MAX_PATH: Final = 4096
MAX_TEXT: Final = 32_768
MAX_SPEC_BYTES: Final = 256 << 10  # encoded; each order and reply about the job contains the spec
SHELLS: Final = frozenset({".sh", ".bash", ".zsh", ".ksh", ".csh", ".fish", ".bat", ".ps1"})
PRIORITIES: Final = (0.01, 100.0)
GRACE_S: Final = 30.0  # default of `grace_s`
MAX_GRACE_S: Final = 3600.0
INTERACTIVE_RUN_S: Final = 4 * 3600.0  # default of `max_run_s` of an interactive job
MAX_FAMILY: Final = 200
MAX_GPU_TYPE: Final = 100
MAX_CPUS: Final = 65_536.0
MAX_EXPONENT: Final = 500.0
MAX_UTILITY: Final = 1e9
MAX_DEADLINE_S: Final = 1e10  # three hundred years
PROGRESS_DEADLINE_S: Final = 1800.0  # default; steps and evaluations may be long
MIN_PROGRESS_S: Final = 60.0
MAX_DECAY: Final = 1e6  # per second
MIN_RATE: Final = 1e-30  # learning rate
MAX_RATE: Final = 1e30
MAX_STOP: Final = {
    "epochs": MAX_EPOCHS,
    "samples": MAX_SAMPLES,
    "plateau": MAX_EPOCHS,
    "consecutive": MAX_EPOCHS,
}
ELASTIC_FIELDS: Final = (  # fields that mean nothing to a rigid job
    "script", "args", "max_batch_size", "max_local_batch", "lr", "slots_wanted", "record_samples",
    "stop", "progress_deadline_s", "seed", "utility", "sweep", "trial", "track",
)  # fmt: skip
_NO_DEVICE: Final = "leave it out: a worker sees the device of its slot, as device 0, and no other"
_NO_GROUP: Final = "leave it out: a group that changes relies on its value"
_NCCL: Final = (  # the first three names are older
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_COMM_BLOCKING",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "TORCH_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)  # fmt: skip
CLUSTER_VARIABLES: Final = {  # variables set for each worker -> remedy for a job that sets them
    "CUDA_VISIBLE_DEVICES": _NO_DEVICE,
    "CUDA_DEVICE_ORDER": _NO_DEVICE,
    "NVIDIA_VISIBLE_DEVICES": _NO_DEVICE,
    **dict.fromkeys(_NCCL, _NO_GROUP),
}


CLUSTER_PREFIX: Final = "ONES_"


def is_reserved(name: str) -> bool:
    """True if the cluster sets this environment variable, so that jobs must not set it."""
    return name.startswith(CLUSTER_PREFIX) or name in CLUSTER_VARIABLES


class StopRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Condition that ends the training: `epochs`, `samples`, or a condition on `metric`.

    Exactly one of them is set, with one exception: a condition on `metric` may be combined with
    `epochs`, which is then the maximum number of epochs.
    """

    EXAMPLES: ClassVar = {
        "epochs": "30",
        "samples": "1000000",
        "metric": '"accuracy"',
        "at_least": "0.97",
        "plateau": "5",
    }
    epochs: int | None = None  # passes over the data set
    samples: int | None = None  # trained samples
    metric: str | None = None  # reported by the script at the end of each epoch
    at_least: float | None = None  # with `metric`: reached in `consecutive` epochs in a row
    consecutive: int = 1  # epochs in a row, with `at_least`
    plateau: int | None = None  # with `metric`: stop after this many epochs without an increase


class Utility(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of a job's completion for its user (OASiS: Bao et al., INFOCOM '18, section III).

    A job that completes t seconds after its submission is worth
    value / (1 + exp(decay (t - deadline_s))).
    """

    EXAMPLES: ClassVar = {"value": "80", "deadline_s": "3600", "decay": "0.01"}
    value: float  # theta_1, relative to other jobs
    deadline_s: float = math.inf  # theta_3, seconds after the submission; default: no deadline
    decay: float = 0.0  # theta_2, per second: rate at which the value falls at the deadline

    def at(self, seconds: float) -> float:
        """Return the value of a completion `seconds` after the submission."""
        if self.decay == 0.0 or self.deadline_s == math.inf:
            return self.value
        late = self.decay * (seconds - self.deadline_s)
        return 0.0 if late > MAX_EXPONENT else self.value / (1.0 + math.exp(late))


class SecretEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Variables of a job whose values are neither in its job file nor in the journal."""

    names: tuple[str, ...]
    id: str = ""  # under which the controller keeps the values; chosen by the controller


class EndWarning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signal to the processes of a rigid job before its time is over."""

    before_s: float = 60.0  # seconds before its end
    signal: Literal["USR1", "USR2", "HUP", "INT", "TERM"] = "USR1"  # signal that is sent
    to: Literal["all", "first", "others"] = "all"  # "first": only the program itself


class Shape(NamedTuple):
    """Requests of a job for its slots and nodes. An empty value or 0 is no request."""

    gpu_type: str
    labels: tuple[tuple[str, str], ...]
    cpus: float  # cores for each slot
    memory_bytes: int  # for each slot
    image: bool = False  # nodes that run containers
    requirements: bool = False  # nodes that build environments


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as its user describes it. Its fields are the fields of a job file."""

    EXAMPLES: ClassVar = {  # example values in a job file, quoted in errors
        "name": '"digits"',
        "kind": '"elastic", "torchrun", "command" or "interactive"',
        "script": '"train.py"',
        "command": '["python", "prepare.py", "--rows", "1000"]',
        "batch_size": "64",
        "args": '["--width", "64"]',
        "max_batch_size": '2048, "keep" or "auto"',
        "max_local_batch": "512",
        "lr": "0.05",
        "slots": "[1, 8] (least, most) or slots = 4",
        "family": '"resnet"',
        "slots_wanted": "2",
        "python": '".venv/bin/python"',
        "requirements": '"requirements.txt"',
        "image": '"docker.io/library/python:3.13"',
        "record_samples": "true",
        "track": '"tensorboard", "mlflow" or "wandb"',
        "stop": "{ epochs = 30 }, { samples = 1000000 }, "
        '{ metric = "accuracy", at_least = 0.97 } or { metric = "accuracy", plateau = 5 }',
        "retries": "1",
        "max_run_s": "3600",
        "grace_s": "60",
        "progress_deadline_s": "600",
        "seed": "7",
        "utility": "{ value = 80, deadline_s = 3600, decay = 0.01 }",
        "project": '"vision"',
        "class": '"urgent"',
        "env": '{ OMP_NUM_THREADS = "1" }',
        "secret_env": '"secrets.env"',
        "labels": '{ team = "vision" }',
        "gpu_type": '"a100"',
        "constraints": '{ nvlink = "yes" }',
        "exclusive": "true",
        "cpus": "4.0",
        "memory_bytes": "17179869184",
        "array": '"0-9%3"',
        "after": '["ok:prepare-3", "any:clean-4"]',
        "not_before": '"2026-12-01T08:00Z"',  # or "+2h"
        "deadline": '"2026-12-02T08:00Z"',  # or "+1d"
        "warn": '{ before_s = 60, signal = "USR1" }',
    }
    name: str  # letters, digits, - and _; the job is called NAME-N
    kind: Kind | msgspec.UnsetType = msgspec.UNSET  # default: elastic
    script: str = ""  # run as python -P -m elastic.launch SCRIPT ARGS in a snapshot of `workdir`
    command: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # program and arguments; rigid
    batch_size: int = 0  # initial global batch, samples per step; rigid: the number of slots
    args: tuple[str, ...] = ()  # arguments of the script
    workdir: str = "."  # folder that is uploaded, relative to the job file
    max_batch_size: int | Literal["keep", "auto"] | None = None  # keep: batch_size; default: auto
    max_local_batch: int | None = None  # samples per step that fit one slot; default: batch_size
    lr: float | None = None  # learning rate at `batch_size`; default: the script's own
    slots: Slots = (1, 1)  # (least, most); a single number sets both
    family: str | None = None  # equal for jobs of one script and model; default: name, script, args
    slots_wanted: int | None = None  # for policies that assign a fixed number; default: least
    python: str | None = None  # interpreter with torch; default: the agent's
    requirements: str | msgspec.UnsetType = msgspec.UNSET  # file in `workdir`, installed by uv
    image: str | msgspec.UnsetType = msgspec.UNSET  # container image in which it runs
    record_samples: bool = False  # log the samples of each committed step
    # experiment tracker that gets the metrics; default: none
    track: Literal["tensorboard", "mlflow", "wandb"] | msgspec.UnsetType = msgspec.UNSET
    stop: StopRule | None = None  # default: the script's own number of epochs
    priority: float = 1.0  # weight of the job's time relative to other jobs
    retries: int = 0  # number of script failures after which the job restarts from its last epoch
    on_loss: Literal["restart", "fail"] | msgspec.UnsetType = msgspec.UNSET  # default: restart
    max_run_s: float | msgspec.UnsetType = (
        msgspec.UNSET
    )  # limit of seconds with slots; default: none
    grace_s: float | msgspec.UnsetType = msgspec.UNSET  # rigid: seconds from TERM to KILL
    progress_deadline_s: float | msgspec.UnsetType = msgspec.UNSET  # seconds; default: 1800
    seed: int | msgspec.UnsetType = msgspec.UNSET  # default: the script's own
    utility: Utility | msgspec.UnsetType = msgspec.UNSET  # for policies that accept or reject jobs
    project: str | msgspec.UnsetType = msgspec.UNSET  # default: the first one of the user's key
    # priority class; default: none
    job_class: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="class")
    env: dict[str, str] = msgspec.field(default_factory=dict)  # environment variables
    secret_env: str | SecretEnv | msgspec.UnsetType = msgspec.UNSET  # a file, until the submission
    sweep: SweepSpec | msgspec.UnsetType = msgspec.UNSET  # set if the job is a sweep
    trial: TrialSpec | msgspec.UnsetType = msgspec.UNSET  # set if the job is a graduated trial
    not_before: str | msgspec.UnsetType = msgspec.UNSET  # earliest start: a time or a delay
    deadline: str | msgspec.UnsetType = msgspec.UNSET  # latest end, likewise
    warn: EndWarning | msgspec.UnsetType = msgspec.UNSET  # rigid: signal before the end
    after: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # ok:JOB, any:JOB or failed:JOB
    array: str | msgspec.UnsetType = msgspec.UNSET  # FIRST-LAST, or FIRST-LAST%MOST at a time
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # by which jobs are selected
    element: ArrayElement | msgspec.UnsetType = msgspec.UNSET  # set if the job is of an array
    gpu_type: str | msgspec.UnsetType = msgspec.UNSET  # words of the model that its slots report
    constraints: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # labels of its nodes
    exclusive: bool | msgspec.UnsetType = msgspec.UNSET  # rigid: no other job on its nodes
    cpus: float | msgspec.UnsetType = msgspec.UNSET  # cores for each slot; of a job without slots
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET  # bytes for each slot, likewise

    def __post_init__(self) -> None:
        """Convert a single number of slots to a range. Give a rigid job one sample per slot."""
        if isinstance(self.slots, int):
            msgspec.structs.force_setattr(self, "slots", (self.slots, self.slots))
        if self.rigid and not self.batch_size:
            msgspec.structs.force_setattr(self, "batch_size", max(1, self.slots[1]))

    @property
    def rigid(self) -> bool:
        """True if the job's number of slots is fixed and its program knows nothing of the cluster.

        The program is stopped with TERM, and begins again after it was pre-empted.
        """
        return self.kind == "torchrun" or self.single

    @property
    def single(self) -> bool:
        """True if one process has all slots of the job, on one node."""
        return self.kind in {"command", "interactive"}

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments of a rigid job; script and arguments of another job."""
        return (self.script, *self.args) if self.command is msgspec.UNSET else self.command

    @property
    def grace_limit_s(self) -> float:
        """Seconds from TERM to KILL for the processes of a rigid job."""
        return GRACE_S if self.grace_s is msgspec.UNSET else self.grace_s

    @property
    def batch_limit(self) -> int:
        """Largest global batch that the user allows, in samples.

        If the cluster chooses the limit, this is the batch that the maximum number of slots can
        process in one pass. Policies use a smaller limit, see `controlplane.core.model.job`.
        """
        if isinstance(self.max_batch_size, int):
            return self.max_batch_size
        if self.max_batch_size == KEEP or self.rigid:
            return self.batch_size
        return max(self.batch_size, min(self.pass_limit * self.slots[1], MAX_BATCH))

    @property
    def batch_limit_is_auto(self) -> bool:
        """True if the cluster chooses the largest batch, based on data set and noise scale."""
        return self.max_batch_size in {None, AUTO} and not self.rigid

    @property
    def pass_limit(self) -> int:
        """Largest batch that one slot may process in one pass, in samples."""
        return self.batch_size if self.max_local_batch is None else self.max_local_batch

    @property
    def local_limit(self) -> int:
        """Largest share of a step that a policy may assign to one slot, in samples.

        It is at least `batch_size`, because a job may start on one slot. A worker splits a share
        above `pass_limit` into several passes.
        """
        return max(self.batch_size, self.pass_limit)

    @property
    def wanted(self) -> int:
        """Number of slots for policies that assign a fixed number."""
        return self.slots[0] if self.slots_wanted is None else self.slots_wanted

    @property
    def fails_on_loss(self) -> bool:
        """True if the job fails, instead of restarting, when no worker has its state any more.

        This is the default of a single program, which may not be repeatable.
        """
        if self.on_loss is msgspec.UNSET:
            return self.single
        return self.on_loss == "fail"

    @property
    def run_limit_s(self) -> float | None:
        """Seconds with slots after which the job is stopped; None: no limit."""
        default = INTERACTIVE_RUN_S if self.kind == "interactive" else None
        return default if self.max_run_s is msgspec.UNSET else self.max_run_s

    @property
    def progress_limit_s(self) -> float:
        """Seconds that a change of the group may wait for steps of its members."""
        stated = self.progress_deadline_s
        return PROGRESS_DEADLINE_S if stated is msgspec.UNSET else stated

    @property
    def stated_seed(self) -> int | None:
        """Seed given by the user, or None if the script chooses the seed."""
        return None if self.seed is msgspec.UNSET else self.seed

    @property
    def stated_sweep(self) -> SweepSpec | None:
        """Description of the sweep, or None for an ordinary job."""
        return None if self.sweep is msgspec.UNSET else self.sweep

    @property
    def stated_trial(self) -> TrialSpec | None:
        """Graduated trial that this job continues, or None for other jobs."""
        return None if self.trial is msgspec.UNSET else self.trial

    @property
    def parents(self) -> tuple[Parent, ...]:
        """Jobs that have to end before this job may start."""
        return () if self.after is msgspec.UNSET else parents_in(self.after)

    @property
    def stated_class(self) -> str:
        """Priority class of the job, or "" if it has none."""
        return "" if self.job_class is msgspec.UNSET else self.job_class

    @property
    def stated_labels(self) -> dict[str, str]:
        """Labels of the job."""
        return {} if self.labels is msgspec.UNSET else self.labels

    @property
    def shape(self) -> Shape:
        """Requests of the job for its slots and nodes, besides their number."""
        stated = {} if self.constraints is msgspec.UNSET else self.constraints
        return Shape(
            gpu_type="" if self.gpu_type is msgspec.UNSET else self.gpu_type,
            labels=tuple(sorted(stated.items())),
            cpus=0.0 if self.cpus is msgspec.UNSET else self.cpus,
            memory_bytes=0 if self.memory_bytes is msgspec.UNSET else self.memory_bytes,
            image=bool(self.stated_image),
            requirements=bool(self.stated_requirements),
        )

    @property
    def indices(self) -> ArrayRange | None:
        """Indices of an array, or None for other jobs."""
        return None if self.array is msgspec.UNSET else range_of(self.array)

    @property
    def stated_element(self) -> ArrayElement | None:
        """Place in an array, or None for other jobs."""
        return None if self.element is msgspec.UNSET else self.element

    def earliest_start(self, submitted_at: Seconds) -> Seconds:
        """Return the earliest start of a job that was submitted at that time."""
        if self.not_before is msgspec.UNSET:
            return Seconds(0.0)
        return stated_time(self.not_before, submitted_at)

    def latest_end(self, submitted_at: Seconds) -> Seconds | None:
        """Return the deadline of a job that was submitted at that time; None: it has none."""
        if self.deadline is msgspec.UNSET:
            return None
        return stated_time(self.deadline, submitted_at, "deadline")

    @property
    def stated_warning(self) -> EndWarning | None:
        """Signal before the end of the job's time, or None."""
        return None if self.warn is msgspec.UNSET else self.warn

    @property
    def stated_requirements(self) -> str:
        """Requirements file in the working directory, or "" if the job has none."""
        return "" if self.requirements is msgspec.UNSET else self.requirements

    @property
    def stated_track(self) -> str:
        """Service that gets the scalars of the job's epochs, or "" if none does."""
        return "" if self.track is msgspec.UNSET else self.track

    @property
    def stated_image(self) -> str:
        """Image of the containers in which the job runs, or "" if it runs in none."""
        return "" if self.image is msgspec.UNSET else self.image

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Names of the variables whose values the job file does not contain."""
        return self.secret_env.names if isinstance(self.secret_env, SecretEnv) else ()

    @property
    def stated_utility(self) -> Utility | None:
        """Utility given by the user, or None."""
        return None if self.utility is msgspec.UNSET else self.utility


class JobProblem(msgspec.Struct, frozen=True):
    """Problem of a job file, with its remedy."""

    field: str
    what: str
    remedy: str


def problems(spec: JobSpec) -> tuple[JobProblem, ...]:
    """Return all problems of a decoded job, in the order of its fields.

    Decoding has checked the types. This function checks everything that types cannot express.
    """
    text = (*_text(spec), *_kind(spec), *_paths(spec))
    shape = (*text, *_batches(spec), *_slots(spec), *_requests(spec), *_priority(spec))
    rest = (*_run(spec), *_stop(spec.stop), *_utility(spec.stated_utility))
    return (*shape, *rest, *_sweep(spec), *_relations(spec), *_size(spec))


@cache
def _elastic_defaults() -> Mapping[str, object]:
    known = {field.name: field.default for field in msgspec.structs.fields(JobSpec)}
    return {field: known[field] for field in ELASTIC_FIELDS}


def _kind(spec: JobSpec) -> Iterator[JobProblem]:
    """Check that a job has the fields of its kind, and no others."""
    if spec.image is not msgspec.UNSET and not IMAGE.fullmatch(spec.image):
        remedy = f"write image = {JobSpec.EXAMPLES['image']}"
        yield JobProblem("image", "it is not the name of an image", remedy)
    if spec.stated_image and spec.stated_requirements:
        yield JobProblem("requirements", "does not apply to an image", "install them in the image")
    if not spec.rigid:
        for field in ("script", "batch_size"):
            if not getattr(spec, field):
                remedy = f"write {field} = {JobSpec.EXAMPLES[field]}"
                yield JobProblem(field, "is missing", remedy)
        for field in ("command", "grace_s", "warn"):
            if getattr(spec, field) is not msgspec.UNSET:
                remedy = f'give kind = "command" or "torchrun", or leave {field} out'
                yield JobProblem(field, "does not apply to an elastic job", remedy)
        return
    if not spec.command or not spec.argv[0]:
        yield JobProblem("command", "is missing", f"write command = {JobSpec.EXAMPLES['command']}")
    elif len(spec.argv) > MAX_ARGS or not all(map(_is_word, spec.argv)):
        yield JobProblem("command", "too many, too long or with a NUL byte", "shorten it")
    if spec.slots[0] != spec.slots[1]:
        what = f"slots {list(spec.slots)} is a range, and a {spec.kind} job has a fixed number"
        yield JobProblem("slots", what, f"write slots = {spec.slots[1]}")
    if not 0.0 <= spec.grace_limit_s <= MAX_GRACE_S:
        what = f"{spec.grace_s} is not 0 to {MAX_GRACE_S:g} seconds"
        yield JobProblem("grace_s", what, "choose a value in this range")
    for field, default in _elastic_defaults().items():
        if getattr(spec, field) != default:
            remedy = "leave it out, or give it to the program in command"
            yield JobProblem(field, f"does not apply to a {spec.kind} job", remedy)
    if spec.batch_size != max(1, spec.slots[1]):
        remedy = "leave it out, or give it to the program in command"
        yield JobProblem("batch_size", f"does not apply to a {spec.kind} job", remedy)


def _relations(spec: JobSpec) -> Iterator[JobProblem]:
    try:
        spec.earliest_start(Seconds(0.0))
        spec.latest_end(Seconds(0.0))
        _ = spec.parents, spec.indices
        check_labels(spec.stated_labels)
    except BadFieldError as error:
        yield JobProblem(error.field, error.message.removeprefix(f"{error.field}: "), error.hint)
    if spec.stated_element is not None:
        yield JobProblem("element", "is written by the cluster", "give array instead")
    if spec.array is not msgspec.UNSET and len(spec.name) > MAX_ARRAY_NAME:
        what = f"an array's name has {len(spec.name)} characters, at most {MAX_ARRAY_NAME}"
        yield JobProblem("name", what, "shorten it: its elements are called NAME_INDEX")


def spec_bytes(spec: JobSpec) -> int:
    """Return the size of an encoded job file.

    Raises:
        OverflowError: or UnicodeEncodeError, if the job file cannot be encoded.
    """
    return len(msgspec.msgpack.encode(spec))


def _size(spec: JobSpec) -> Iterator[JobProblem]:
    try:
        size = spec_bytes(spec)
    except (OverflowError, UnicodeEncodeError):
        return  # another check reports it
    if size > MAX_SPEC_BYTES:
        what = f"the job file has {size} bytes, at most {MAX_SPEC_BYTES}"
        yield JobProblem("args", what, "put large values into a file of the working directory")


def _text(spec: JobSpec) -> Iterator[JobProblem]:
    if not NAME.fullmatch(spec.name):
        remedy = "use 1 to 48 letters, digits, - or _, starting with a letter or digit"
        yield JobProblem("name", f"{spec.name[:60]!r} is not a job name", remedy)
    if spec.family is not None and not 1 <= len(spec.family) <= MAX_FAMILY:
        remedy = f"give 1 to {MAX_FAMILY} characters, or leave it out"
        yield JobProblem("family", f"it has {len(spec.family)} characters", remedy)
    elif spec.family is not None and not (is_text(spec.family) and spec.family.isprintable()):
        yield JobProblem("family", "it has characters that are not printable", "remove them")
    parts = spec.script.removeprefix("./").split("/")
    if not spec.script:
        pass  # `_kind` requires it where it applies
    elif not spec.script.isprintable():
        remedy = "rename the file"
        yield JobProblem("script", f"{spec.script[:200]!r} has control characters", remedy)
    elif not {"", ".", ".."}.isdisjoint(parts):
        remedy = "give a path relative to workdir, such as train.py"
        yield JobProblem("script", f"{spec.script[:200]!r} is not inside workdir", remedy)
    elif (other := script_problem(spec.script)) is not None:
        yield JobProblem("script", *other)
    if len(spec.args) > MAX_ARGS or not all(map(_is_word, spec.args)):
        yield JobProblem("args", "too many, too long or with a NUL byte", "shorten them")
    if len(spec.env) > MAX_VARIABLES:
        what = f"it has {len(spec.env)} variables, at most {MAX_VARIABLES}"
        yield JobProblem("env", what, "put them into a file of the working directory")
        return
    for name, value in spec.env.items():
        if not ENV_NAME.fullmatch(name) or not _is_word(value):
            remedy = "names are letters, digits and _, values at most 32 KiB without NUL"
            yield JobProblem(f"env.{name[:60]}", "invalid variable", remedy)
        yield from _reserved("env", name)
    if isinstance(spec.secret_env, str):
        yield JobProblem("secret_env", "is a file of the client", "submit it with `ones submit`")
    elif spec.secret_env is not msgspec.UNSET and not spec.secret_names:
        yield JobProblem("secret_env", "has no variable", "leave it out")
    for name in spec.secret_names:
        if not ENV_NAME.fullmatch(name):  # which may be a value by mistake
            remedy = "names are letters, digits and _"
            yield JobProblem("secret_env", "a name is no variable name", remedy)
        elif name in spec.env:
            remedy = "remove it from one of them"
            yield JobProblem(f"secret_env.{name}", "is a variable of [env], too", remedy)
        yield from _reserved("secret_env", name)


def _reserved(field: str, name: str) -> Iterator[JobProblem]:
    if name.startswith(CLUSTER_PREFIX):
        remedy = "choose a name without the prefix ONES_"
        yield JobProblem(f"{field}.{name}", "is reserved for the cluster", remedy)
    if name in CLUSTER_VARIABLES:
        what = "is set by the cluster for each worker"
        yield JobProblem(f"{field}.{name}", what, CLUSTER_VARIABLES[name])


def are_secrets(values: Mapping[str, str]) -> bool:
    """True if a process can receive these values of secrets."""
    sizes = (len(name) + len(value.encode()) for name, value in values.items() if is_text(value))
    return all(map(_is_word, values.values())) and sum(sizes) <= MAX_SECRET_BYTES


def is_text(text: str) -> bool:
    """True if a text can be encoded in UTF-8. JSON and TOML can contain texts that cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_word(text: str) -> bool:
    """True if a process can receive the text as an argument or as an environment variable."""
    return len(text) <= MAX_TEXT and "\0" not in text and is_text(text)


def _paths(spec: JobSpec) -> Iterator[JobProblem]:
    parts = spec.stated_requirements.removeprefix("./").split("/")
    if spec.requirements is not msgspec.UNSET and not {"", ".", ".."}.isdisjoint(parts):
        remedy = "give a path relative to workdir, such as requirements.txt"
        yield JobProblem("requirements", "it is not inside workdir", remedy)
    for field in ("script", "workdir", "python", "requirements"):
        path = getattr(spec, field) or ""
        if len(path) > MAX_PATH:
            what = f"a path of {len(path)} characters, at most {MAX_PATH}"
            yield JobProblem(field, what, "give a shorter one")
        elif not is_text(path) or ("\0" in path and field != "script"):
            yield JobProblem(field, "it is not a path", "give one without NUL bytes, in UTF-8")


def script_problem(script: str, first: bytes = b"") -> tuple[str, str] | None:
    """Return why a script is not Python, and the remedy. If it may be Python, return None.

    `first` are the first bytes of the script, if known.
    """
    name = script.rpartition("/")[2]
    suffix = name[name.rfind(".") :].lower() if "." in name[1:] else ""
    shebang = first.partition(b"\n")[0] if not suffix and first.startswith(b"#!") else b""
    if suffix == ".ipynb":
        remedy = f"write it out with `jupyter nbconvert --to script {name}`"
    elif suffix in SHELLS or (shebang and b"python" not in shebang):
        remedy = "give the Python file that it runs; its arguments go into args, exports into env"
    elif suffix not in {"", ".py"} or b"\0" in first:
        remedy = "give the Python file that trains, such as train.py"
    else:
        return None
    return f"scripts are Python; {script[:200]} is not", remedy


def _batches(spec: JobSpec) -> Iterator[JobProblem]:
    if not spec.batch_size:
        return  # `_kind` requires it where it applies
    if not 1 <= spec.batch_size <= MAX_BATCH or spec.batch_limit > MAX_BATCH:
        what = f"{spec.batch_size} is not 1 to {MAX_BATCH}"
        yield JobProblem("batch_size", what, "choose a value in this range")
    if spec.batch_limit < spec.batch_size:
        what = f"max_batch_size {spec.batch_limit} is below batch_size {spec.batch_size}"
        yield JobProblem("max_batch_size", what, "raise the first or lower the second")
    if spec.max_local_batch is not None and not 1 <= spec.max_local_batch <= MAX_BATCH:
        what = f"{spec.max_local_batch} is not 1 to {MAX_BATCH}"
        yield JobProblem("max_local_batch", what, "choose a value in this range")
    if spec.lr is not None and not MIN_RATE <= spec.lr <= MAX_RATE:
        remedy = "give a positive finite number, or leave it out to keep the script's"
        yield JobProblem("lr", f"{spec.lr} is not a learning rate", remedy)


def _priority(spec: JobSpec) -> Iterator[JobProblem]:
    least, most = PRIORITIES
    if not least <= spec.priority <= most:
        what = f"{spec.priority} is not {least:g} to {most:g}"
        yield JobProblem("priority", what, "give a weight in this range; 1 is the default")


def _slots(spec: JobSpec) -> Iterator[JobProblem]:
    least, most = spec.slots
    if spec.single and least == most == 0:
        return  # it runs beside the slots of its node
    if least < 1 or most < least:
        what = f"slots [{least}, {most}] is not a range"
        yield JobProblem("slots", what, "give [least, most] with 1 <= least <= most")
    elif most > MAX_SLOTS:
        what = f"slots: the maximum {most} exceeds {MAX_SLOTS}"
        yield JobProblem("slots", what, "lower the maximum")
    elif least > spec.batch_size >= 1:
        what = f"slots: the minimum {least} exceeds batch_size {spec.batch_size}"
        yield JobProblem("slots", what, "lower the first or raise the second")
    elif not least <= spec.wanted <= most:
        what = f"slots_wanted {spec.wanted} is outside slots [{least}, {most}]"
        yield JobProblem("slots_wanted", what, "choose a number within slots")


def _requests(spec: JobSpec) -> Iterator[JobProblem]:
    shape = spec.shape
    if spec.gpu_type is not msgspec.UNSET and not (
        words_of(shape.gpu_type) and len(shape.gpu_type) <= MAX_GPU_TYPE
    ):
        what = f"{shape.gpu_type[:60]!r} is not a type of GPU"
        yield JobProblem("gpu_type", what, "give words of a device in `ones node list`: a100")
    try:
        check_labels(dict(shape.labels), "constraints")
    except BadFieldError as error:
        what = error.message.removeprefix("constraints: ")
        yield JobProblem("constraints", what, error.hint)
    if spec.cpus is not msgspec.UNSET and not 0 < spec.cpus <= MAX_CPUS:
        what = f"{spec.cpus} is not a number of cores"
        yield JobProblem("cpus", what, f"give a number above 0, at most {MAX_CPUS:g}")
    if spec.memory_bytes is not msgspec.UNSET and not 0 < spec.memory_bytes <= MAX_SAMPLES:
        what = f"{spec.memory_bytes} is not a number of bytes"
        yield JobProblem("memory_bytes", what, "give bytes for each slot, above 0")
    if spec.exclusive is True and not spec.rigid:
        remedy = "leave it out: an elastic job shares nodes"
        yield JobProblem("exclusive", "does not apply to an elastic job", remedy)
    for field in ("gpu_type", "exclusive"):
        if spec.slots[1] == 0 and getattr(spec, field) not in {msgspec.UNSET, False}:
            yield JobProblem(field, "does not apply to a job without slots", "leave it out")


def words_of(text: str) -> frozenset[str]:
    """Return the words of a type or model of GPU, in lower case."""
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


def _sweep(spec: JobSpec) -> Iterator[JobProblem]:
    """Check a sweep, which has no batch and no script, because each worker trains another model."""
    if spec.stated_trial is not None:
        remedy = "give sweep.graduate_batch instead"
        yield JobProblem("trial", "is written by the cluster", remedy)
        return
    sweep = spec.stated_sweep
    if sweep is None:
        return
    if spec.script != SWEEP_SCRIPT:
        remedy = f"name its functions in [sweep], and give script = {SWEEP_SCRIPT!r}"
        yield JobProblem("script", "a sweep has no script", remedy)
    most = spec.slots[1]
    if spec.batch_size != most or spec.batch_limit != most or spec.batch_limit_is_auto:
        what = f"a sweep has no batch: its batch size is its maximum of slots, {most}"
        remedy = f"give batch_size = {most} and max_batch_size = {KEEP!r}"
        yield JobProblem("batch_size", what, remedy)
    for field, given, remedy in (
        ("args", bool(spec.args), "give what varies in sweep.search.space, the rest in env"),
        ("lr", spec.lr is not None, "make it a value of sweep.search.space"),
        (
            "record_samples",
            spec.record_samples,
            "`ones sweep manifest` lists the samples of each model",
        ),
        ("stop", spec.stop is not None, "give sweep.search.epochs"),
        ("on_loss", spec.on_loss is not msgspec.UNSET, "lost units are trained again"),
        ("seed", spec.stated_seed is not None, "give sweep.search.seed"),
        ("utility", spec.stated_utility is not None, "give priority"),
        ("array", spec.array is not msgspec.UNSET, "submit one sweep"),
    ):
        if given:
            yield JobProblem(field, "does not apply to a sweep", f"{remedy}, and leave it out")
    try:
        check_sweep(sweep)
    except SettingsError as error:
        inside = "" if error.field in SweepSpec.__struct_fields__ else "search."
        yield JobProblem(f"sweep.{inside}{error.field}", error.message, error.hint)


def _run(spec: JobSpec) -> Iterator[JobProblem]:
    if not 0 <= spec.retries <= 100:  # noqa: PLR2004 - a bound against typing errors
        what = f"{spec.retries} is not 0 to 100"
        yield JobProblem("retries", what, "choose a value in this range")
    if spec.run_limit_s is not None and not 0 < spec.run_limit_s < math.inf:
        what = f"{spec.run_limit_s} is not a positive number of seconds"
        yield JobProblem("max_run_s", what, "give one, or leave it out for no limit")
    warning = spec.stated_warning
    if warning is not None and not 0.0 < warning.before_s < math.inf:
        what = f"{warning.before_s} is not a positive number of seconds"
        yield JobProblem("warn.before_s", what, "give seconds before the end of its time")
    endless = spec.run_limit_s is None and spec.deadline is msgspec.UNSET
    if warning is not None and spec.rigid and endless:
        yield JobProblem("warn", "the job's time is not limited", "give max_run_s or deadline, too")
    if not MIN_PROGRESS_S <= spec.progress_limit_s < math.inf:
        what = f"{spec.progress_deadline_s} is not a number of seconds from {MIN_PROGRESS_S:g} up"
        remedy = f"give one, or leave it out for {PROGRESS_DEADLINE_S:g}"
        yield JobProblem("progress_deadline_s", what, remedy)
    if spec.stated_seed is not None and not 0 <= spec.stated_seed < 2**63:
        remedy = "give 0 to 2**63 - 1, or leave it out to keep the script's"
        yield JobProblem("seed", f"{spec.seed} is out of range", remedy)


def _utility(utility: Utility | None) -> Iterator[JobProblem]:
    if utility is None:
        return
    if not 0.0 <= utility.value <= MAX_UTILITY:
        remedy = f"give 0 to {MAX_UTILITY:.0e}: its value relative to other jobs"
        yield JobProblem("utility.value", f"{utility.value} is out of range", remedy)
    deadline_s = utility.deadline_s
    if not 0.0 < deadline_s <= MAX_DEADLINE_S and deadline_s != math.inf:
        what = f"{deadline_s} is {'too far off' if deadline_s > 0.0 else 'in the past'}"
        remedy = f"give seconds after its submission, above 0, at most {MAX_DEADLINE_S:g}"
        yield JobProblem("utility.deadline_s", what, f"{remedy}, or leave it out")
    if not 0.0 <= utility.decay <= MAX_DECAY:
        remedy = f"give 0 (its deadline does not matter) to {MAX_DECAY:g}, per second"
        yield JobProblem("utility.decay", f"{utility.decay} is out of range", remedy)


def _stop(stop: StopRule | None) -> Iterator[JobProblem]:
    if stop is None:
        return
    forms = "give one of epochs, samples, metric with at_least, metric with plateau"
    if stop.metric is None:
        if stop.at_least is not None or stop.plateau is not None:
            yield JobProblem("stop.metric", "at_least and plateau need a metric", forms)
        elif (stop.epochs is None) == (stop.samples is None):
            yield JobProblem("stop", "not exactly one of epochs and samples", forms)
    elif stop.samples is not None or (stop.at_least is None) == (stop.plateau is None):
        yield JobProblem("stop", "a metric needs either at_least or plateau", forms)
    for name, most in MAX_STOP.items():
        value = getattr(stop, name)
        if value is not None and value < 1:
            yield JobProblem(f"stop.{name}", f"{value} is below 1", "raise it")
        elif value is not None and value > most:
            what = f"{value} is above {most}"
            yield JobProblem(f"stop.{name}", what, f"give 1 to {most}")
    if stop.metric is not None and not is_metric(stop.metric):
        what = f"{stop.metric[:60]!r} is not a metric name"
        yield JobProblem("stop.metric", what, f"give 1 to {MAX_METRIC} printable characters")
    if stop.at_least is not None and not math.isfinite(stop.at_least):
        yield JobProblem("stop.at_least", f"{stop.at_least} is not finite", "give a number")

"""What models of neural networks ask of the parts of a server that are not their GPU.

Harmony (Bao et al., INFOCOM '19) trains six models on servers of two GTX 1080 Ti and says which of
them disturb each other, but not what they ask for. Gradients and batches below are public facts
about the models; cores, other transfers and how far a step waits for them are plausible choices,
from what each does beside its GPU: decode images, prepare short texts, exchange many parameters.
None of them was fitted to how schedulers compare.

What every rule answers, and what it may ask of the jobs that train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol, runtime_checkable
from zlib import crc32

from numpy.random import default_rng

from schemas.ids import JobId, NodeId

Bound = Literal["cpu", "pcie", "network", "compute"]
BOUNDS: Final[tuple[Bound, ...]] = ("cpu", "pcie", "network", "compute")


@dataclass(frozen=True, slots=True)
class Demand:
    """One worker at full speed: what it asks for, and how far its step waits for that.

    `waits` are shares of a step: one of 0.5 makes a step 1.5 times as long where a worker gets half
    of what it asks for.
    """

    bound: Bound  # what it mostly waits for; compute: its GPU, which it shares with nobody
    cores: float
    input_bytes_per_s: float  # to the GPU, without gradients
    gradient_bytes: float  # of a step; they go to servers and back, or through a ring
    step_s: float
    waits: tuple[float, float, float]  # for cores, for PCIe, for the network
    servers: int = 0  # parameter servers of the job; 0: all-reduce

    @property
    def gradient_bytes_per_s(self) -> float:
        """Of one worker."""
        return self.gradient_bytes / self.step_s

    @property
    def server_cores(self) -> float:
        """Of one parameter server: one, and another for each 2 GB/s of updates; chosen."""
        return 1.0 + self.gradient_bytes_per_s / 2e9


@runtime_checkable
class StatesDemand(Protocol):
    """A job that says itself what it asks for."""

    @property
    def demand(self) -> Demand:
        """Of one worker, with the job's servers."""
        ...


# fmt: off
DEMANDS: Final[Mapping[str, Demand]] = {
    # Harmony, case study 1. Batches of 32 images, 64 sentences, 20 x 35 words.
    # ImageNet is decoded at about 100 images/s per core; 25.6 M parameters.
    "resnet50": Demand("cpu", 6.0, 0.2e9, 102e6, .16, (.60, .10, .20)),
    # 138 M parameters: "frequent parameter exchanges among workers".
    "vgg16": Demand("network", 3.5, 0.2e9, 553e6, .27, (.15, .25, .60)),
    # CIFAR10 is augmented image by image; 1.7 M parameters.
    "resnext110": Demand("compute", 5.0, 0.1e9, 7e6, .12, (.35, .10, .05)),
    # Attention over long sentences, a large vocabulary: 100 M parameters, many transfers.
    "seq2seq": Demand("pcie", 3.0, 1.5e9, 400e6, .35, (.10, .50, .30)),
    # A small convolution that the CPU can hardly feed ("CPU caches"); 5 M parameters.
    "ctc": Demand("cpu", 7.0, 0.3e9, 20e6, .03, (.60, .15, .15)),
    # Two LSTM layers of 1500: 66 M parameters, hardly any input.
    "wlm": Demand("network", 2.0, 0.1e9, 264e6, .20, (.10, .20, .50)),
    # Others that are simulated here, on the same terms.
    "alexnet": Demand("cpu", 7.0, 0.6e9, 244e6, .13, (.60, .15, .40)),
    "inception": Demand("compute", 5.0, 0.2e9, 109e6, .25, (.35, .05, .15)),
    "googlenet": Demand("compute", 4.0, 0.1e9, 25e6, .16, (.30, .05, .10)),
    "bert": Demand("network", 2.0, 0.2e9, 440e6, .14, (.05, .20, .50)),
    "yolo": Demand("cpu", 6.0, 0.4e9, 248e6, .30, (.50, .15, .30)),
    "speech": Demand("pcie", 4.5, 1.0e9, 150e6, .30, (.25, .40, .25)),
    "recommendation": Demand("pcie", 3.5, 2.0e9, 120e6, .10, (.20, .60, .30)),
}
# fmt: on

KNOWN_AS: Final[Mapping[str, str]] = {  # part of a name -> whose demand; the first that fits
    **{name: name for name in DEMANDS},
    "resnet": "resnet50", "resnext": "resnext110", "cifar": "resnext110", "vgg": "vgg16",
    "imagenet": "resnet50", "transformer": "bert", "lstm": "wlm", "lm": "wlm", "language": "wlm",
    "ncf": "recommendation", "embedding": "recommendation", "deepspeech": "speech",
}  # fmt: skip


@cache
def demand_of(family: str) -> Demand:
    """What the workers of a family ask for; for a name that says nothing it is made up, from it.

    Args:
        family: of jobs, such as `vgg16-imagenet`.
    """
    name = family.lower()
    known = next((KNOWN_AS[part] for part in KNOWN_AS if part in name), None)
    return DEMANDS[known] if known is not None else _made_up(name)


def _made_up(name: str) -> Demand:
    """Between those that are known, the same for the same name."""
    rng = default_rng(crc32(name.encode()))
    bound = BOUNDS[int(rng.integers(len(BOUNDS)))]
    weights = {"cpu": (0.6, 0.1, 0.2), "pcie": (0.1, 0.5, 0.2), "network": (0.1, 0.2, 0.5)}
    return Demand(
        bound,
        cores=float(rng.uniform(2.0, 7.0)),
        input_bytes_per_s=math.exp(rng.uniform(math.log(0.1e9), math.log(1.5e9))),
        gradient_bytes=math.exp(rng.uniform(math.log(10e6), math.log(500e6))),
        step_s=float(rng.uniform(0.1, 0.3)),
        waits=weights.get(bound, (0.15, 0.1, 0.1)),
    )


class Interference(Protocol):
    """By how much a job is slowed down. Alone it never is; another job never makes it faster."""

    def remaining_speed(self, job: JobId, at: Mapping[NodeId, Mapping[JobId, int]]) -> float:
        """The share of its speed that `job` keeps, in (0, 1].

        Args:
            at: every node that it is on, and the workers of all jobs there, its own too.
        """
        ...


class TrainingJobs(Protocol):
    """The truth about jobs that train, as far as it matters to their neighbours."""

    def family(self, job: JobId) -> str:
        """What it trains.

        Args:
            job: that trains.
        """
        ...

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Its workers on each node, in rank order.

        Args:
            job: that trains.
        """
        ...

    def demand(self, job: JobId) -> Demand:
        """What its workers and servers ask of a node at full speed.

        Args:
            job: that trains.
        """
        ...

    def gpu(self, node: NodeId) -> str:
        """The type of its GPUs, as in `simulated_cluster.RELATIVE_SPEEDS`."""
        ...

    def slots(self, node: NodeId) -> int:
        """How many slots it has."""
        ...


def speed_shares(
    rule: Interference, on: Mapping[NodeId, Mapping[JobId, int]]
) -> dict[JobId, float]:
    """What every job keeps of its speed.

    Args:
        on: the workers of all jobs on every node.
    """
    nodes: dict[JobId, list[NodeId]] = {}
    for node, here in on.items():
        for job in here:
            nodes.setdefault(job, []).append(node)
    return {
        job: rule.remaining_speed(job, {node: on[node] for node in its})
        for job, its in nodes.items()
    }

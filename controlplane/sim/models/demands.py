"""The demands of jobs on the CPU, PCIe and network of a server, and interference interfaces.

Harmony (Bao et al., INFOCOM '19) trains six models on servers of two GTX 1080 Ti. The paper says
which models slow each other down, but not their demands. Gradients and batches below are public
facts about the models. Cores, other transfers and waiting shares are plausible choices. No number
was fitted to the results of schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol
from zlib import crc32

from numpy.random import default_rng

from schemas.ids import JobId, NodeId

Bound = Literal["cpu", "pcie", "network", "compute"]
BOTTLENECKS: Final[tuple[Bound, ...]] = ("cpu", "pcie", "network", "compute")


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of one worker at full speed, and shares of its step that wait for each resource.

    `waits` are shares of a step. With a share of 0.5, a step takes 1.5 times as long if the worker
    gets half of its demand.
    """

    bound: Bound  # main bottleneck; "compute" is the GPU, which jobs never share
    cores: float
    input_bytes_per_s: float  # transfers to the GPU, excluding gradients
    gradient_bytes: float  # per step; exchanged with servers or in a ring
    step_s: float
    waits: tuple[float, float, float]  # shares for cores, PCIe and network
    servers: int = 0  # number of parameter servers of the job; 0: all-reduce

    @property
    def gradient_bytes_per_s(self) -> float:
        """Bytes of gradients that one worker produces per second."""
        return self.gradient_bytes / self.step_s

    @property
    def server_cores(self) -> float:
        """Cores that a parameter server needs: 1, plus 1 for each 2 GB/s of updates; chosen."""
        return 1.0 + self.gradient_bytes_per_s / 2e9


# fmt: off
DEMANDS: Final[Mapping[str, Demand]] = {
    # Harmony, case study 1. Batches of 32 images, 64 sentences, 20 x 35 words.
    # One core decodes about 100 images/s of ImageNet; 25.6 M parameters.
    "resnet50": Demand("cpu", 6.0, 0.2e9, 102e6, .16, (.60, .10, .20)),
    # 138 M parameters: "frequent parameter exchanges among workers".
    "vgg16": Demand("network", 3.5, 0.2e9, 553e6, .27, (.15, .25, .60)),
    # Each image of CIFAR10 is augmented separately; 1.7 M parameters.
    "resnext110": Demand("compute", 5.0, 0.1e9, 7e6, .12, (.35, .10, .05)),
    # Attention over long sentences, a large vocabulary: 100 M parameters, many transfers.
    "seq2seq": Demand("pcie", 3.0, 1.5e9, 400e6, .35, (.10, .50, .30)),
    # A small convolution that the CPU can hardly supply with data ("CPU caches"); 5 M parameters.
    "ctc": Demand("cpu", 7.0, 0.3e9, 20e6, .03, (.60, .15, .15)),
    # Two LSTM layers of 1500 units: 66 M parameters, very little input.
    "wlm": Demand("network", 2.0, 0.1e9, 264e6, .20, (.10, .20, .50)),
    # Other models of the simulator; numbers found by the same method.
    "alexnet": Demand("cpu", 7.0, 0.6e9, 244e6, .13, (.60, .15, .40)),
    "inception": Demand("compute", 5.0, 0.2e9, 109e6, .25, (.35, .05, .15)),
    "googlenet": Demand("compute", 4.0, 0.1e9, 25e6, .16, (.30, .05, .10)),
    "bert": Demand("network", 2.0, 0.2e9, 440e6, .14, (.05, .20, .50)),
    "yolo": Demand("cpu", 6.0, 0.4e9, 248e6, .30, (.50, .15, .30)),
    "speech": Demand("pcie", 4.5, 1.0e9, 150e6, .30, (.25, .40, .25)),
    "recommendation": Demand("pcie", 3.5, 2.0e9, 120e6, .10, (.20, .60, .30)),
}
# fmt: on

FAMILY_ALIASES: Final[Mapping[str, str]] = {  # part of a name -> key of `DEMANDS`; first match wins
    **{name: name for name in DEMANDS},
    "resnet": "resnet50", "resnext": "resnext110", "cifar": "resnext110", "vgg": "vgg16",
    "imagenet": "resnet50", "transformer": "bert", "lstm": "wlm", "lm": "wlm", "language": "wlm",
    "ncf": "recommendation", "embedding": "recommendation", "deepspeech": "speech",
}  # fmt: skip


@cache
def demand_of(family: str) -> Demand:
    """Return the demand of a family, such as `vgg16-imagenet`, or a random one if it is unknown."""
    name = family.lower()
    known = next((FAMILY_ALIASES[part] for part in FAMILY_ALIASES if part in name), None)
    return DEMANDS[known] if known is not None else _invented_demand(name)


def _invented_demand(name: str) -> Demand:
    """Draw a demand in the range of the known demands; equal names get equal demands."""
    rng = default_rng(crc32(name.encode()))
    bound = BOTTLENECKS[int(rng.integers(len(BOTTLENECKS)))]
    weights = {"cpu": (0.6, 0.1, 0.2), "pcie": (0.1, 0.5, 0.2), "network": (0.1, 0.2, 0.5)}
    return Demand(
        bound,
        cores=float(rng.uniform(2.0, 7.0)),
        input_bytes_per_s=math.exp(rng.uniform(math.log(0.1e9), math.log(1.5e9))),
        gradient_bytes=math.exp(rng.uniform(math.log(10e6), math.log(500e6))),
        step_s=float(rng.uniform(0.1, 0.3)),
        waits=weights.get(bound, (0.15, 0.1, 0.1)),
    )


# A rule of interference returns the fraction of its full speed at which a job runs, in (0, 1]. The
# second argument maps each node of the job to the workers of every job on this node, including the
# job itself. A job without neighbours runs at full speed, and a neighbour never speeds a job up.
Workers = Mapping[NodeId, Mapping[JobId, int]]
Interference = Callable[[JobId, Workers], float]


class TrainingJobs(Protocol):
    """Ground truth about training jobs on which interference depends."""

    def family(self, job: JobId) -> str:
        """Return the name of the job's family."""
        ...

    def placement(self, job: JobId) -> Mapping[NodeId, int]:
        """Return the number of the job's workers on each node, in rank order."""
        ...

    def demand(self, job: JobId) -> Demand:
        """Return the demand of one of the job's workers, with the job's number of servers."""
        ...

    def gpu(self, node: NodeId) -> str:
        """Return the GPU model of the node, a key of `cluster.RELATIVE_SPEEDS`."""
        ...

    def slots(self, node: NodeId) -> int:
        """Return the number of slots on the node."""
        ...

"""The policy network: one small net for every job, another for the end of the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from controlplane.policy.drl.inputs import CLUSTER_INPUTS, INPUTS_VERSION, JOB_INPUTS
from controlplane.policy.learned.dense_net import dense_net, dense_shapes
from controlplane.policy.learned.model_file import LearnedModel, read_model, shipped_model
from controlplane.prediction.array_types import FloatArray

POLICY: Final = "drl"
SHIPPED: Final = "drl.npz"  # beside this module
HIDDEN: Final = 32  # units of each layer between
ACTIONS: Final = 3  # of each job: more, fewer, same
JOB_NET: Final = (JOB_INPUTS + CLUSTER_INPUTS, HIDDEN, HIDDEN, ACTIONS)  # widths
END_NET: Final = (CLUSTER_INPUTS, HIDDEN, 1)
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    **dense_shapes("job", JOB_NET),
    **dense_shapes("end", END_NET),
}


class Actor:
    """Scores the actions of a round.

    Every job is scored by the same net, from its own inputs and those of the cluster. So the
    number of jobs and slots is free, and a type of job is what was measured of it, not an index:
    one that was never trained on is nothing special.
    """

    def __init__(self, arrays: Mapping[str, FloatArray]) -> None:
        """Take the nets out of a model."""
        self._job = dense_net("job", arrays)
        self._end = dense_net("end", arrays)

    def logits(self, jobs: FloatArray, cluster: FloatArray) -> FloatArray:
        """Of every action, legal or not.

        Args:
            jobs: shape (N, JOB_INPUTS).
            cluster: shape (CLUSTER_INPUTS,).

        Returns:
            Shape (3 N + 1,): more, fewer, same of the first job, of the next; the end of the round.
        """
        both = np.hstack((jobs, np.broadcast_to(cluster, (len(jobs), len(cluster)))))
        end = self._end(cluster[None, :])
        return np.concatenate((self._job(both).ravel(), end.ravel()))


def read_actor_model(file: str | None) -> LearnedModel:
    """The model of policy `drl`, checked.

    Args:
        file: path of it; None: the one that ships.

    Raises:
        SettingsError: if it cannot be used.
    """
    if file is None:
        package = __name__.rpartition(".")[0]
        return shipped_model(
            package, SHIPPED, policy=POLICY, features=INPUTS_VERSION, shapes=SHAPES
        )
    return read_model(file, policy=POLICY, features=INPUTS_VERSION, shapes=SHAPES)

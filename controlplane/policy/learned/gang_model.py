"""Trained model of `harmony-drl`, and placement of a gang by this model, worker by worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.learned.model_file import (
    FIELD,
    DenseNet,
    LearnedModel,
    dense_net,
    dense_shapes,
    read_model,
    softmax,
)
from controlplane.policy.learned.shared_nodes import WORKER_SCALE, RewardModel, SharedNodes
from controlplane.prediction import FloatArray, IntArray
from schemas.errors import SettingsError

STRUCTURE: Final = 12  # number of features of a node, without those of classes


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor pi(s, a), which scores every node with the same network.

    In the paper the network has one output for each server, so that a policy fits one number of
    servers. Here one network scores any node, so that the cluster may grow. The score starts from
    the loss that the reward model expects, and the network corrects it. Before any training the
    choice is greedy.
    """

    net: DenseNet  # its inputs are `features_of`
    sharpness: float  # weight of the expected loss of speed

    def scores(self, costs: FloatArray, features: FloatArray) -> FloatArray:
        """Return the logits of the candidates at these expected costs; the greatest is best."""
        return self.net(features)[:, 0] - self.sharpness * costs


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate nodes for one worker, with their scores."""

    nodes: IntArray  # shape (M,)
    costs: FloatArray  # shape (M,)
    features: FloatArray  # shape (M, inputs)
    own: FloatArray  # expected loss of the job itself, shape (M,)
    scores: FloatArray  # shape (M,)


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen node of one worker, with the alternatives."""

    among: Candidates
    place: int  # index in `among`

    @property
    def node(self) -> int:
        """Number of the chosen node."""
        return int(self.among.nodes[self.place])

    @property
    def score(self) -> float:
        """Score of the chosen node."""
        return float(self.among.scores[self.place])


Choose = Callable[[Candidates], int]  # returns the index of the chosen candidate


def place_gang(shared: SharedNodes, actor: Actor, name: str, choose: Choose) -> list[Choice]:
    """Place the workers of a job that has none yet, one after the other; return the choices."""
    choices: list[Choice] = []
    for _ in range(shared.jobs[name].size):
        nodes = nodes_with_room(shared)
        own, neighbours = shared.costs_of_next(name, nodes)
        costs = own + neighbours
        features = features_of(shared, name, nodes, own, neighbours)
        scores = actor.scores(costs, features)
        among = Candidates(nodes, costs, features, own, scores)
        choice = Choice(among, choose(among))
        shared.put(name, choice.node)
        choices.append(choice)
    return choices


def nodes_with_room(shared: SharedNodes) -> IntArray:
    """Return the nodes with a free slot; among equal empty nodes, only the first."""
    found: list[int] = []
    empty: set[int] = set()
    for node in np.flatnonzero(shared.free > 0).tolist():
        if not shared.on(node):
            room = int(shared.free[node])
            if room in empty:
                continue
            empty.add(room)
        found.append(node)
    return np.array(found, dtype=np.int64)


def features_of(
    shared: SharedNodes, name: str, nodes: IntArray, own: FloatArray, neighbours: FloatArray
) -> FloatArray:
    """Return the actor's inputs for each candidate, shape (M, 12 + 2 classes).

    They are the paper's state s = (x, r, w, p, v, d) for each node. Slots are the only resource of
    a node here (r, v), and parameter servers use none. `own` and `neighbours` are the losses that
    one more worker would cause for the job itself and for the jobs on the node, shape (M,).
    """
    job, classes = shared.jobs[name], shared.model.classes
    placed = sum(job.workers.values())
    left = job.size - placed
    free, size = shared.free[nodes], shared.sizes[nodes]
    own_workers = np.array([job.workers.get(node, 0) for node in nodes.tolist()], dtype=np.float64)
    found = np.zeros((len(nodes), STRUCTURE + 2 * classes))
    found[:, 0], found[:, 1] = own, neighbours
    found[:, 2] = (free - 1) / size
    found[:, 3] = own_workers / WORKER_SCALE
    found[:, 4] = free >= left
    found[:, 5] = free == left
    found[:, 6] = (size - free) == 0
    found[:, 7] = left / WORKER_SCALE
    found[:, 8] = placed / WORKER_SCALE
    found[:, 9] = len(job.workers) / WORKER_SCALE
    found[:, 10] = shared.free.sum() / max(int(shared.sizes.sum()), 1)
    found[:, 11] = [len(shared.on(node)) / WORKER_SCALE for node in nodes.tolist()]
    found[:, STRUCTURE + job.number] = 1.0
    found[:, STRUCTURE + classes :] = shared.present(nodes) / WORKER_SCALE
    return found


def best(among: Candidates) -> int:
    """Return the index of the greatest score; among equal scores, the first."""
    return int(np.argmax(among.scores))


def sampled(rng: Generator) -> Choose:
    """Return a function that draws a candidate from the policy's probabilities."""

    def choose(among: Candidates) -> int:
        return int(rng.choice(len(among.scores), p=softmax(among.scores)))

    return choose


POLICY: Final = "harmony-drl"
FEATURES: Final = 1  # version of the networks' inputs
CLASSES: Final = 12  # L of the paper: trained classes, and some for other families
BESIDE_NET: Final = (4 * CLASSES + 2, 32, 1)  # widths of the layers
SPREAD_NET: Final = (CLASSES + 3, 16, 1)
ACTOR_NET: Final = (STRUCTURE + 2 * CLASSES, 32, 1)
SHAPES: Final = {
    **dense_shapes("beside", BESIDE_NET),
    **dense_shapes("spread", SPREAD_NET),
    **dense_shapes("actor", ACTOR_NET),
    "sharpness": (1,),
}


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Both networks of the paper, and the families that they were trained on."""

    reward: RewardModel
    actor: Actor
    families: tuple[str, ...]  # names by class number, fewer than CLASSES


def load(file: str | None) -> TrainedModel:
    """Return the model in `file`, or the shipped model if `file` is None.

    Raises:
        SettingsError: if the file is no model, or a model of another version, policy or shape.
            Also if its card lists too many families, or lists one family twice.
    """
    model = read(file)
    families = model.card.families
    if len(families) >= CLASSES:
        raise _refusal(f"{len(families)} families, more than {CLASSES - 1}")
    for name in families:
        if families.count(name) > 1:
            raise _refusal(f"family {name!r} twice")
    return model_of(model.arrays, families)


def read(file: str | None) -> LearnedModel:
    """Return arrays and card of the model in `file`, or of the shipped model if `file` is None.

    Raises:
        SettingsError: if the file is no model, or a model of another version, policy or shape.
    """
    return read_model(file, "harmony_drl.npz", policy=POLICY, features=FEATURES, shapes=SHAPES)


def model_of(arrays: Mapping[str, FloatArray], families: tuple[str, ...]) -> TrainedModel:
    """Return the trained model made of these arrays and families."""
    reward = RewardModel(dense_net("beside", arrays), dense_net("spread", arrays), CLASSES)
    actor = Actor(dense_net("actor", arrays), float(arrays["sharpness"][0]))
    return TrainedModel(reward, actor, families)


def _refusal(problem: str) -> SettingsError:
    return SettingsError(f"{FIELD}: a model with {problem}", "train another one", FIELD)

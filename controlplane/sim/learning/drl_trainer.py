"""Trainer of policy `drl`: imitation of a heuristic, then reinforcement learning.

The network is the torch counterpart of `policy.drl.actor`, with the names and shapes of the model
file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from controlplane.policy.api import PolicyEvent
from controlplane.policy.learned.decision_round import (
    ACTIONS,
    END_NET,
    FEWER,
    INPUTS_VERSION,
    JOB_NET,
    MORE,
    POLICY,
    SHAPES,
    DecisionInput,
)
from controlplane.policy.learned.model_file import LearnedModel, ModelCard
from controlplane.prediction import BoolArray, FloatArray
from controlplane.sim.learning.drl_episodes import (
    GAMMA,
    GRID_S,
    Experience,
    TakenAction,
    average_jct_s,
    drawn,
    episode,
    pack,
    past,
    returns,
    training_scenario,
    unpack,
)
from controlplane.sim.learning.training_run import Trained
from controlplane.sim.scenario import Scenario

ILLEGAL_LOGIT = -1e9  # logit of an illegal action


class ActorNet(nn.Module):
    """Scores the actions of many moments at once; see `policy.drl.actor`."""

    def __init__(self) -> None:
        super().__init__()
        self.job = _layers(JOB_NET)
        self.end = _layers(END_NET)

    def forward(self, jobs: Tensor, cluster: Tensor, legal: Tensor) -> Tensor:
        """Return logarithms of the probabilities of all actions.

        Args:
            jobs: shape (B, N, JOB_INPUTS), zero-padded.
            cluster: shape (B, CLUSTER_INPUTS).
            legal: shape (B, 3 N + 1).

        Returns:
            Shape (B, 3 N + 1); far below 0 where an action is not legal.
        """
        spread = cluster[:, None, :].expand(-1, jobs.shape[1], -1)
        per_job = _forward(self.job, torch.cat((jobs, spread), dim=2)).flatten(1)
        logits = torch.cat((per_job, _forward(self.end, cluster)), dim=1)
        return torch.log_softmax(logits.masked_fill(~legal, ILLEGAL_LOGIT), dim=1)

    def arrays(self) -> dict[str, FloatArray]:
        """Return the parameters in the layout of the model file."""
        return {
            name: np.asarray(value.detach().numpy(), dtype=np.float64)
            for name, value in self.state_dict().items()
        }


class ActionBatch:
    """Decisions as tensors, padded to the largest number of jobs."""

    def __init__(self, decisions: Sequence[TakenAction]) -> None:
        most = max(len(decision.jobs) for decision in decisions)
        width = decisions[0].jobs.shape[1]
        jobs = np.zeros((len(decisions), most, width), dtype=np.float32)
        legal = np.zeros((len(decisions), 3 * most + 1), dtype=np.bool_)
        for place, decision in enumerate(decisions):
            many = len(decision.jobs)
            jobs[place, :many] = decision.jobs
            legal[place, : 3 * many] = decision.legal[:-1]
            legal[place, -1] = decision.legal[-1]
        self._most = most
        self._many = [len(decision.jobs) for decision in decisions]
        self.jobs = torch.from_numpy(jobs)
        self.cluster = torch.from_numpy(
            np.array([decision.cluster for decision in decisions], dtype=np.float32)
        )
        self.legal = torch.from_numpy(legal)

    def index(self, actions: Sequence[int]) -> Tensor:
        """Translate actions to the columns of `ActorNet`, where the end action comes last."""
        return torch.tensor(
            [
                3 * self._most if action == 3 * many else action
                for action, many in zip(actions, self._many, strict=True)
            ]
        )


def _layers(widths: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))


def _forward(layers: nn.ModuleList, values: Tensor) -> Tensor:
    for place, layer in enumerate(layers):
        values = layer(values)
        if place + 1 < len(layers):
            values = torch.tanh(values)
    return values


WORTH_EXPONENT: Final = 0.55  # exponent of the remaining time in the worth of a slot
PATIENCE_S: Final = 60.0  # added to the remaining time


def teacher_action(moment: DecisionInput) -> int:
    """Return the heuristic's legal action: shortest expected job first, spare slots to short jobs.

    DL2 warms up on whatever scheduler a cluster had. Here the waiting job with the shortest
    remaining time starts, on its least slots, and up to an equal share of the cluster if more are
    free. If none fits, the running job to which a slot is worth least gives one back. If no job
    waits, the job to which another slot is worth most grows, at most to twice its size. The worth
    of a slot is the share of a step that it saves, over the remaining time to the power of 0.55. An
    action is one step of this.
    """
    table, sizes = moment.table, moment.sizes
    legal = moment.legal[:-1].reshape(-1, ACTIONS)
    end = len(moment.legal) - 1
    begun = np.flatnonzero(sizes != table.have)
    waits = sizes == 0
    now = np.maximum(sizes, table.least)
    step_s = table.step_s(now)
    rest_s = step_s * table.steps_left
    worth = (rest_s + PATIENCE_S) ** -WORTH_EXPONENT
    gain = (1.0 - table.step_s(now + 1) / step_s) * worth
    if begun.size:
        row = int(begun[0])
        grows_on = sizes[row] > table.have[row] and legal[row, MORE] and gain[row] > 0.0
        return row * ACTIONS + MORE if grows_on and sizes[row] < _enough(moment, row) else end
    starts = legal[:, MORE] & waits
    if starts.any():
        return _action_at_least(starts, rest_s, MORE)
    if waits.any():
        shrinks = legal[:, FEWER] & (sizes > table.least)
        loss = (table.step_s(np.maximum(now - 1, 1)) / step_s - 1.0) * worth
        return _action_at_least(shrinks, loss, FEWER) if shrinks.any() else end
    grows = legal[:, MORE] & ~waits & (gain > 0.0)
    return _action_at_least(grows, -gain, MORE) if grows.any() else end


def _enough(moment: DecisionInput, row: int) -> int:
    """Return the size at which a job stops growing within one round."""
    have = int(moment.table.have[row])
    return 2 * have if have else moment.table.room // max(1, len(moment.sizes))


def _action_at_least(rows: BoolArray, least: FloatArray, action: int) -> int:
    return int(np.where(rows, least, np.inf).argmin()) * ACTIONS + action


FIRST_TRACE: Final = 1_000_000  # first seed of training traces
TRACES_PER_SEED: Final = 100_000  # seeds of traces per seed of a training
VALIDATION_OFFSET: Final = 90_000  # offset of the validation traces
MAX_ADVANTAGE: Final = 3.0  # limit of advantages, standard deviations
PAST_OFFSET: Final = 99_000  # offset of the trace behind the past events


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of a training."""

    warm_iterations: int = 10  # of imitation
    iterations: int = 60  # total
    sizes: tuple[int, ...] = (16, 32, 64)  # slots per cluster
    jobs: int = 60  # of an episode
    past: int = 200  # jobs known before every other episode
    intervals_s: tuple[float, float] = (20.0, 45.0)  # range of the mean time between submissions
    rollouts: int = 3  # per trace
    warm_rate: float = 0.005
    rate: float = 1e-4
    entropy: float = 0.1
    replay: int = 8192  # latest decisions
    batch: int = 256
    warm_updates: int = 120  # per iteration
    updates: int = 24
    clip: float = 0.2  # of the probability ratio of a decision
    look_every: int = 10  # iterations between validations
    looks: int = 2  # validation traces per size


class DrlTrainer:
    """Supervised, then reinforced training; see the README of this folder."""

    def __init__(self, seed: int, recipe: Recipe | None = None) -> None:
        """Start with random weights; `recipe` None: that of the shipped model."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._seed, self._recipe = seed, recipe or Recipe()
        self._net = ActorNet()
        self._adam = self._new_adam(self._recipe.warm_rate)
        self._replay: list[Experience] = []
        self._greedy_pick: dict[str, FloatArray] = self._net.arrays()
        self._best_score = math.inf
        self._first_score = math.nan
        self._heuristic: dict[int, float] = {}  # completion times of the heuristic, by trace
        self._past: list[PolicyEvent] | None = None  # simulated on first use

    @property
    def settings(self) -> Mapping[str, float | str]:
        """Recipe as texts."""
        recipe = self._recipe
        return {name: str(getattr(recipe, name)) for name in recipe.__dataclass_fields__}

    @property
    def iterations(self) -> int:
        """Total number of iterations."""
        return self._recipe.iterations

    def iterate(self, iteration: int) -> dict[str, float | str]:
        """Run episodes on new traces, and learn from them."""
        recipe, rng = self._recipe, default_rng((self._seed, iteration))
        torch.manual_seed(int(rng.integers(2**31)))
        warm = iteration < recipe.warm_iterations
        if iteration == recipe.warm_iterations:
            self._replay.clear()  # imitated actions have no probability
            self._adam = self._new_adam(recipe.rate)
        row = self._imitate(iteration, rng) if warm else self._reinforce(iteration, rng)
        last = iteration + 1 == recipe.iterations
        look = last or (iteration + 1) % recipe.look_every == 0
        score = self._validate() if look else math.nan
        return {"phase": "imitates" if warm else "reinforced", **row, "jct_vs_heuristic": score}

    def state(self) -> dict[str, Any]:
        """Return weights, optimiser state and replay buffer."""
        return {
            "net": {name: value.clone() for name, value in self._net.state_dict().items()},
            "adam": _deep_copy(self._adam.state_dict()),
            "replay": pack(self._replay),
            "best": {
                name: torch.from_numpy(value.copy()) for name, value in self._greedy_pick.items()
            },
            "best_score": self._best_score,
            "first_score": self._first_score,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._net.load_state_dict(state["net"])
        self._adam.load_state_dict(state["adam"])
        self._replay = unpack(state["replay"])
        self._greedy_pick = {name: value.numpy() for name, value in state["best"].items()}
        self._best_score, self._first_score = state["best_score"], state["first_score"]

    def trained(self) -> Trained:
        """Return the best model on the validation traces."""
        recipe = self._recipe
        looked = {"jct_vs_heuristic": self._best_score, "jct_vs_heuristic_warm": self._first_score}
        return Trained(
            features=INPUTS_VERSION,
            slots=(min(recipe.sizes), max(recipe.sizes)),
            cluster=(
                f"table2, {recipe.jobs} jobs, one every {recipe.intervals_s[0]:g} to"
                f" {recipe.intervals_s[1]:g} s, on {', '.join(map(str, recipe.sizes))} V100 in"
                f" nodes of 4; traces from seed {self._trace(0)} on"
            ),
            figures={k: round(v, 4) for k, v in looked.items() if math.isfinite(v)},
            arrays=self._greedy_pick,
        )

    # --- two ways to learn

    def _imitate(self, iteration: int, rng: Generator) -> dict[str, float | str]:
        """Act with a growing share of own actions, and learn the heuristic's actions."""
        recipe = self._recipe
        share = iteration / max(1, recipe.warm_iterations - 1)

        def pick(moment: DecisionInput, odds: FloatArray) -> tuple[int, int]:
            taught = teacher_action(moment)
            own = rng.random() < share
            return (int(odds.argmax()) if own else taught), taught

        jcts: list[float] = []
        for place, slots in enumerate(recipe.sizes):
            scenario, model = self._scenario(slots, rng), self._model()
            at = iteration * len(recipe.sizes) + place
            decisions, result = episode(
                model, scenario, self._trace(at), pick, self._past_events(at)
            )
            self._add_experience([Experience(decision, 0.0) for decision in decisions])
            jcts.append(average_jct_s(result))
        losses = [self._imitation_step(rng) for _ in range(recipe.warm_updates)]
        return {
            "loss": float(np.mean(losses)),
            "entropy": math.nan,
            "jct_s": float(np.mean(jcts)),
        }

    def _reinforce(self, iteration: int, rng: Generator) -> dict[str, float | str]:
        """Run several episodes on one trace, and make actions better than their mean more probable.

        The mean of several returns on the same arrivals is a baseline that knows the arrivals (Mao
        et al., ICLR '19): most of the noise of a return comes from the arrivals.
        """
        recipe = self._recipe
        slots = recipe.sizes[iteration % len(recipe.sizes)]
        scenario = self._scenario(slots, rng)
        trace = self._trace(iteration * len(recipe.sizes))
        model, heard = self._model(), self._past_events(iteration // len(recipe.sizes))
        played = [
            episode(model, scenario, trace, drawn(rng), heard) for _ in range(recipe.rollouts)
        ]
        gains = advantages([returns(result) for _, result in played])
        for (decisions, _), gain in zip(played, gains, strict=True):
            self._add_experience(
                [
                    Experience(decision, float(gain[min(int(decision.at / GRID_S), len(gain) - 1)]))
                    for decision in decisions
                ]
            )
        steps = [self._policy_step(rng) for _ in range(recipe.updates)]
        loss, entropy = np.mean(steps, axis=0).tolist()
        jct_s = float(np.mean([average_jct_s(result) for _, result in played]))
        return {"loss": loss, "entropy": entropy, "jct_s": jct_s}

    def _imitation_step(self, rng: Generator) -> float:
        decisions = [experience.decision for experience in self._sample(rng)]
        batch = ActionBatch(decisions)
        logs = self._net(batch.jobs, batch.cluster, batch.legal)
        taught = batch.index([decision.taught for decision in decisions])
        loss = -logs.gather(1, taught[:, None]).mean()
        self._step(loss)
        return float(loss.detach())

    def _policy_step(self, rng: Generator) -> tuple[float, float]:
        """Take a step on the clipped surrogate (Schulman et al. 2017) of replayed decisions."""
        recipe, sample = self._recipe, self._sample(rng)
        decisions = [experience.decision for experience in sample]
        batch = ActionBatch(decisions)
        logs = self._net(batch.jobs, batch.cluster, batch.legal)
        taken = batch.index([decision.action for decision in decisions])
        before = torch.tensor([max(d.probability, 1e-9) for d in decisions]).log()
        ratio = (logs.gather(1, taken[:, None])[:, 0] - before).exp()
        gain = torch.tensor([experience.gain for experience in sample])
        surrogate = torch.minimum(
            ratio * gain, ratio.clamp(1.0 - recipe.clip, 1.0 + recipe.clip) * gain
        )
        entropy = -(logs.exp() * logs.clamp(min=-50.0)).sum(1)
        choices = batch.legal.sum(1).clamp(min=2).log()
        entropy = (entropy / choices).mean()  # 1: all legal actions are equally probable
        loss = -surrogate.mean() - recipe.entropy * entropy
        self._step(loss)
        return float(loss.detach()), float(entropy.detach())

    # --- helpers

    def _new_adam(self, rate: float) -> torch.optim.Adam:
        return torch.optim.Adam(self._net.parameters(), lr=rate)

    def _step(self, loss: torch.Tensor) -> None:
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._adam.step()

    def _sample(self, rng: Generator) -> list[Experience]:
        many = len(self._replay)
        return [self._replay[at] for at in rng.integers(many, size=min(many, self._recipe.batch))]

    def _add_experience(self, experience: Sequence[Experience]) -> None:
        self._replay.extend(experience)
        del self._replay[: -self._recipe.replay]

    def _scenario(self, slots: int, rng: Generator) -> Scenario:
        low, high = self._recipe.intervals_s
        return training_scenario(slots, self._recipe.jobs, float(rng.uniform(low, high)))

    def _trace(self, place: int) -> int:
        return FIRST_TRACE + TRACES_PER_SEED * self._seed + place

    def _past_events(self, place: int) -> list[PolicyEvent]:
        """Return the past events of an episode: many for every other one, otherwise none."""
        if place % 2:
            return []
        if self._past is None:
            self._past = past(self._recipe.past, self._trace(PAST_OFFSET))
        return self._past

    def _model(self) -> LearnedModel:
        return model_of(self._net.arrays(), self._recipe.sizes)

    def _validate(self) -> float:
        """Return completion times over the heuristic's, a geometric mean; keep the best model."""
        recipe, model, ratios = self._recipe, self._model(), []
        for place, slots in enumerate(recipe.sizes * recipe.looks):
            scenario = training_scenario(slots, recipe.jobs, sum(recipe.intervals_s) / 2)
            seed, heard = self._trace(VALIDATION_OFFSET + place), self._past_events(place)
            _, ours = episode(model, scenario, seed, _greedy_pick, heard)
            if seed not in self._heuristic:
                _, theirs = episode(model, scenario, seed, _teacher_pick, heard)
                self._heuristic[seed] = average_jct_s(theirs)
            ratios.append(average_jct_s(ours) / self._heuristic[seed])
        score = float(np.exp(np.mean(np.log(ratios))))
        if math.isnan(self._first_score):
            self._first_score = score
        if score < self._best_score:
            self._best_score, self._greedy_pick = score, self._net.arrays()
        return score


def advantages(found: Sequence[FloatArray]) -> list[FloatArray]:
    """Return the returns of episodes on one trace, less their mean at the same time, normalised."""
    longest = max(map(len, found))
    padded = np.array([np.pad(values, (0, longest - len(values))) for values in found])
    gains = padded - padded.mean(axis=0)
    scale = float(gains.std()) or 1.0
    return [np.clip(gain / scale, -MAX_ADVANTAGE, MAX_ADVANTAGE) for gain in gains]


def model_of(arrays: Mapping[str, FloatArray], sizes: Sequence[int]) -> LearnedModel:
    """Build the policy's model from a network, without a file."""
    card = ModelCard(
        policy=POLICY,
        features=INPUTS_VERSION,
        shapes=dict(SHAPES),
        slots=(min(sizes), max(sizes)),
        cluster="",
        command="",
        seed=0,
        date="",
        figures={"gamma": GAMMA},
    )
    return LearnedModel(card, arrays)


def _greedy_pick(_: DecisionInput, odds: FloatArray) -> tuple[int, int]:
    return int(odds.argmax()), -1


def _teacher_pick(moment: DecisionInput, _: FloatArray) -> tuple[int, int]:
    return teacher_action(moment), -1


def _deep_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _deep_copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_deep_copy(inner) for inner in value]
    return value

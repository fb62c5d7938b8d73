"""Actor-critic training of a policy's networks in an environment, after a supervised warm-up.

A round simulates several rollouts of one trace with the current networks. A choice becomes more
probable if its step was better than the critic expected, compared with the other rollouts. This
comparison removes the effect of the arrivals, which all rollouts share. Steps of earlier rounds are
replayed, so ratios of probabilities are clipped (Schulman et al. 2017).
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from controlplane.prediction import BoolArray, FloatArray
from controlplane.sim.cluster import TrainingError
from controlplane.sim.models.recording import write_whole

FORMAT: Final = 2  # version of saved states
LAMBDA: Final = 0.95  # lambda of generalised advantages
MAX_ADVANTAGE: Final = 3.0  # limit, in standard deviations
MEAN_DECAY: Final = 0.9  # decay per round of the running mean of networks, as rounds are noisy
FINAL_RATE: Final = 0.2  # learning rate in the last round, as a share of the first
CRITIC_RATE: Final = 3e-3
CRITIC_HIDDEN: Final = 64
MAX_GRADIENT: Final = 1.0  # largest norm
ILLEGAL_LOGIT: Final = -1e9
FIRST_TRACE: Final = 1_000_000  # first seed of training traces; comparisons use smaller seeds
TRACES_PER_SEED: Final = 100_000  # number of trace seeds for each seed of a training

Arrays = Mapping[str, FloatArray]  # arrays of a model file by name
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of one of C options. The first axis of the actor's inputs can have any length."""

    inputs: dict[str, FloatArray]
    allowed: BoolArray  # shape (C,)
    chosen: int


@dataclass(slots=True)
class Step:
    """Choices that are made one after the other, and their results."""

    at: float  # seconds since the start of the episode
    place: float  # position at which other rollouts are compared with the step
    state: FloatArray  # inputs of the critic before the choices
    choices: list[Choice]
    log_probability: float = 0.0  # of all choices, at the time of the rollout
    advantage: float = 0.0  # in standard deviations over the rollouts
    value: float = 0.0  # target of the critic


@dataclass(frozen=True, slots=True)
class Rollout:
    """The steps of an episode by time, and its rewards: (start s, end s, reward per second)."""

    steps: list[Step]
    rewards: list[tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training."""

    warm_iterations: int
    warm_rate: float  # learning rate of the warm-up
    rounds: int
    rollouts: int  # number of rollouts per trace
    updates: int  # optimiser steps per round
    batch: int = 256
    replay: int  # number of latest steps that are replayed
    rate: float  # learning rate of the actor
    entropy: float  # weight of the entropy, which is 1 if all choices are equally probable
    clip: float = 0.2  # largest change of the ratio of a step's probabilities
    horizon_s: float  # time constant of the discount
    validate_every: int  # number of iterations between two validations


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained networks, and the parts of a model's card that only the environment knows."""

    features: int  # version of the policy's inputs
    slots: tuple[int, int]  # sizes of the smallest and largest training cluster
    cluster: str  # description of these clusters and their jobs
    arrays: Arrays
    families: tuple[str, ...] = ()  # families of jobs, by class number
    figures: dict[str, float] = field(default_factory=dict)  # achieved results


class Environment(Protocol):
    """Interface to the networks, warm-up, rollouts and validation of a policy."""

    recipe: Recipe
    warm_phase: str  # name of the warm-up in the learning curve
    scores: tuple[str, ...]  # names of validation scores; the smallest first score is best
    states: int  # number of the critic's inputs

    def networks(self) -> nn.Module:
        """Return new networks with the parameters of the model file.

        They map the stacked inputs of choices by name, shape (B, W, ...), to logits, shape (B, W,
        C).
        """
        ...

    def warm_up(self, trainer: ActorCriticTrainer, iteration: int, rng: Generator) -> float:
        """Run one iteration of supervised learning; return its loss."""
        ...

    def rollouts(self, number: int, arrays: Arrays, rng: Generator) -> list[Rollout]:
        """Simulate the trace of round `number` several times with these networks."""
        ...

    def validate(self, arrays: Arrays) -> tuple[float, ...]:
        """Return the scores of these networks on the validation traces."""
        ...

    def trained(self, arrays: Arrays) -> Trained:
        """Return the model with these networks."""
        ...


class Dense(nn.ModuleList):
    """Dense layers with tanh between them; parameters have the names of the model file."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs, shape (..., out), for inputs of shape (..., in)."""
        for place, layer in enumerate(self):
            values = layer(torch.tanh(values) if place else values)
        return values

    def start_at_zero(self) -> None:
        """Set the last layer to 0, so that all outputs are 0 until the first training step."""
        with torch.no_grad():
            for parameter in self[-1].parameters():
                parameter.zero_()


def as_batch(steps: Sequence[Step]) -> Batch:
    """Return steps as tensors, padded to the largest number of choices and the longest inputs."""
    most = max(len(step.choices) for step in steps)
    made = np.array([[place < len(step.choices) for place in range(most)] for step in steps])
    chosen = np.zeros(made.shape, np.int64)
    chosen[made] = [choice.chosen for step in steps for choice in step.choices]
    allowed = _padded([[choice.allowed for choice in step.choices] for step in steps], most)
    allowed[..., 0] |= ~made  # padded choices need one allowed option
    numbers = {
        "state": np.array([step.state for step in steps]),
        "log_probability": np.array([step.log_probability for step in steps]),
        "advantage": np.array([step.advantage for step in steps]),
        "value": np.array([step.value for step in steps]),
        "made": made,
    }
    for name in steps[0].choices[0].inputs:
        rows = [[choice.inputs[name] for choice in step.choices] for step in steps]
        numbers[f"inputs.{name}"] = _padded(rows, most)
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in numbers.items()}
    return tensors | {"chosen": torch.tensor(chosen), "allowed": torch.tensor(allowed)}


def _padded(rows: Sequence[Sequence[npt.NDArray[Any]]], most: int) -> npt.NDArray[Any]:
    shape = np.max([array.shape for row in rows for array in row], axis=0)
    found = np.zeros((len(rows), most, *shape), dtype=rows[0][0].dtype)
    for place, row in enumerate(rows):
        for number, array in enumerate(row):
            at: Any = (place, number, *map(slice, array.shape))
            found[at] = array
    return found


def discounted(rollout: Rollout, horizon_s: float) -> tuple[FloatArray, FloatArray]:
    """Return the reward until the next step, and the discount of later rewards, shape (P,).

    Rewards are multiplied by exp(-t / horizon) and divided by the horizon.
    """
    begins = np.array([step.at for step in rollout.steps])
    ends = np.append(begins[1:], np.inf)[:, None]
    start, end, rate = np.array(rollout.rewards).T
    low = np.clip(start, begins[:, None], ends) - begins[:, None]
    high = np.clip(end, begins[:, None], ends) - begins[:, None]
    weights = np.exp(-low / horizon_s) - np.exp(-high / horizon_s)
    return weights @ rate, np.exp(-(ends[:, 0] - begins) / horizon_s)


def advantages(rewards: FloatArray, discounts: FloatArray, values: FloatArray) -> FloatArray:
    """Return the generalised advantages of an episode's steps from the critic's `values`."""
    errors = rewards + discounts * np.append(values[1:], 0.0) - values
    found, later = np.zeros(len(errors)), 0.0
    for at in reversed(range(len(errors))):
        found[at] = later = errors[at] + discounts[at] * LAMBDA * later
    return found


def compared(found: Sequence[FloatArray], rollouts: Sequence[Rollout]) -> list[FloatArray]:
    """Return the advantages minus their mean over all rollouts at the same place, normalised."""
    places = [[step.place for step in rollout.steps] for rollout in rollouts]
    gains = [
        own - np.mean([np.interp(at, *other) for other in zip(places, found, strict=True)], axis=0)
        for own, at in zip(found, places, strict=True)
    ]
    scale = float(np.concatenate(gains).std()) or 1.0
    return [np.clip(gain / scale, -MAX_ADVANTAGE, MAX_ADVANTAGE) for gain in gains]


class ActorCriticTrainer:
    """Trainer of the networks of one environment, iteration by iteration.

    All random draws of an iteration depend only on the seed and the number of the iteration, so a
    resumed training ends with the same networks as an uninterrupted one.
    """

    def __init__(self, environment: Environment, seed: int) -> None:
        torch.set_num_threads(1)  # equal sums on every host; one thread is fast enough
        torch.manual_seed(seed)
        self._environment, self._seed = environment, seed
        self.networks = environment.networks()
        self._critic = Dense((environment.states, CRITIC_HIDDEN, 1))
        self._critic.start_at_zero()
        self._adam = self._new_adam(environment.recipe.warm_rate)
        self._replay: list[Step] = []
        self._mean = copy.deepcopy(self.networks.state_dict())
        self._best: dict[str, Tensor] = {}  # mean networks that were best in validation
        self._best_score = math.inf
        self._figures: dict[str, float] = {}

    @property
    def settings(self) -> Mapping[str, str]:
        """Recipe as texts; a saved training resumes only with an equal recipe."""
        recipe = self._environment.recipe
        return {one.name: str(getattr(recipe, one.name)) for one in fields(recipe)}

    @property
    def iterations(self) -> int:
        """Total number of iterations."""
        return self._environment.recipe.warm_iterations + self._environment.recipe.rounds

    def iterate(self, iteration: int) -> dict[str, float | str]:
        """Run one iteration, which can take seconds, and return a row of the learning curve."""
        environment, recipe = self._environment, self._environment.recipe
        rng, number = default_rng((self._seed, iteration)), iteration - recipe.warm_iterations
        torch.manual_seed(int(rng.integers(2**31)))
        last_warm = number == -1
        row: dict[str, float | str]
        if number < 0:
            loss = environment.warm_up(self, iteration, rng)
            row = {"phase": environment.warm_phase, "loss": loss}
            row |= {"critic_loss": math.nan, "entropy": math.nan}
            self._figures["warm_up_loss"] = loss
            self._mean = copy.deepcopy(self.networks.state_dict())
        else:
            row = {"phase": "actor and critic", **self._round(number, rng)}
        if last_warm:
            self._replay.clear()
            self._adam = self._new_adam(recipe.rate)
        seldom = (iteration + 1) % recipe.validate_every == 0
        look = seldom or last_warm or iteration + 1 == self.iterations
        return row | self._validate(last_warm=last_warm, look=look)

    def trained(self) -> Trained:
        """Return the model that was best in validation, or the current model without validation."""
        found = self._environment.trained(_arrays(self._best or self._mean))
        found.figures.update((name, round(value, 4)) for name, value in self._figures.items())
        return found

    # --- for the warm-up of an environment

    def arrays(self) -> Arrays:
        """Return the parameters of the current networks."""
        return _arrays(self.networks.state_dict())

    def remember(self, steps: Sequence[Step]) -> None:
        """Add steps to the replay; drop the oldest steps if it is full."""
        self._replay.extend(steps)
        del self._replay[: -self._environment.recipe.replay]

    def replayed(self, rng: Generator) -> Batch:
        """Draw a batch of steps from the replay."""
        many = min(len(self._replay), self._environment.recipe.batch)
        return as_batch([self._replay[at] for at in rng.integers(len(self._replay), size=many)])

    def log_probabilities(self, batch: Batch) -> Tensor:
        """Return log probabilities, shape (B, W, C), which are very small for forbidden options."""
        logits = self.networks({
            name.removeprefix("inputs."): value
            for name, value in batch.items()
            if name.startswith("inputs.")
        })  # fmt: skip
        return torch.log_softmax(logits.masked_fill(~batch["allowed"], ILLEGAL_LOGIT), dim=-1)

    def step(self, loss: Tensor) -> float:
        """Run one step of gradient descent; return the loss."""
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for module in (self.networks, self._critic):
            nn.utils.clip_grad_norm_(module.parameters(), MAX_GRADIENT)
        self._adam.step()
        return loss.item()

    # --- rounds

    def _round(self, number: int, rng: Generator) -> dict[str, float]:
        """Run the rollouts of one trace, and learn from their differences."""
        recipe, finals = self._environment.recipe, []
        rollouts = self._environment.rollouts(number, self.arrays(), rng)
        for rollout in rollouts:
            states = np.array([step.state for step in rollout.steps])
            with torch.no_grad():
                values = self._critic(torch.tensor(states, dtype=torch.float32))[:, 0].numpy()
            finals.append(advantages(*discounted(rollout, recipe.horizon_s), values))
            for step, value, gain in zip(rollout.steps, values, finals[-1], strict=True):
                step.value = float(value + gain)
        for rollout, gains in zip(rollouts, compared(finals, rollouts), strict=True):
            for step, gain in zip(rollout.steps, gains, strict=True):
                step.advantage = float(gain)
            self.remember(rollout.steps)
        share = 1.0 - (1.0 - FINAL_RATE) * number / recipe.rounds
        self._adam.param_groups[0]["lr"] = recipe.rate * share
        losses = [self.learn(self.replayed(rng)) for _ in range(recipe.updates)]
        for name, value in self.networks.state_dict().items():
            mean = self._mean[name]
            self._mean[name] = mean + (1.0 - MEAN_DECAY) * (value - mean)
        loss, critic_loss, entropy = np.mean(losses, axis=0).tolist()
        return {"loss": loss, "critic_loss": critic_loss, "entropy": entropy}

    def learn(self, batch: Batch) -> tuple[float, float, float]:
        """Learn from replayed steps; return the loss, the critic's loss and the entropy."""
        recipe, made = self._environment.recipe, batch["made"]
        logs = self.log_probabilities(batch)
        chosen = logs.gather(-1, batch["chosen"][..., None])[..., 0]
        ratio = ((chosen * made).sum(1) - batch["log_probability"]).exp()
        gain = batch["advantage"]
        clipped = ratio.clamp(1.0 - recipe.clip, 1.0 + recipe.clip)
        surrogate = torch.minimum(ratio * gain, clipped * gain).mean()
        entropy = -(logs.exp() * logs).sum(-1) / batch["allowed"].sum(-1).clamp(min=2).log()
        entropy = (entropy * made).sum() / made.sum()
        critic_loss = ((self._critic(batch["state"])[:, 0] - batch["value"]) ** 2).mean()
        loss = self.step(critic_loss - surrogate - recipe.entropy * entropy)
        return loss, critic_loss.item(), entropy.item()

    def _validate(self, *, last_warm: bool, look: bool) -> dict[str, float]:
        """Return scores of the mean networks, or NaN if not `look`, and store the best networks."""
        if not look:
            return dict.fromkeys(self._environment.scores, math.nan)
        values = self._environment.validate(_arrays(self._mean))
        scores = dict(zip(self._environment.scores, values, strict=True))
        if values[0] < self._best_score:
            self._best, self._best_score = copy.deepcopy(self._mean), values[0]
            self._figures |= scores
        if last_warm:
            self._figures |= {f"{name}_warm": value for name, value in scores.items()}
        return scores

    def _new_adam(self, rate: float) -> torch.optim.Adam:
        networks = {"params": self.networks.parameters(), "lr": rate}
        return torch.optim.Adam(
            [networks, {"params": self._critic.parameters(), "lr": CRITIC_RATE}]
        )

    # --- saved states

    def state(self) -> dict[str, Any]:
        """Return a copy of the state: tensors, numbers, texts, lists and dictionaries."""
        replay = msgspec.msgpack.encode(self._replay, enc_hook=_plain_array)
        parts = {
            "networks": self.networks.state_dict(),
            "critic": self._critic.state_dict(),
            "adam": self._adam.state_dict(),
            "replay": torch.frombuffer(bytearray(replay), dtype=torch.uint8),
            "mean": self._mean,
            "best": self._best,
            "best_score": self._best_score,
            "figures": self._figures,
        }
        return copy.deepcopy(parts)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned under equal settings."""
        self.networks.load_state_dict(state["networks"])
        self._critic.load_state_dict(state["critic"])
        self._adam.load_state_dict(state["adam"])
        self._replay = msgspec.msgpack.decode(
            state["replay"].numpy().tobytes(), type=list[Step], dec_hook=_array
        )
        self._mean, self._best, self._figures = state["mean"], state["best"], state["figures"]
        self._best_score = state["best_score"]


def _arrays(parameters: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().double().numpy() for name, value in parameters.items()}


def _plain_array(value: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return value.dtype.str, value.shape, value.tobytes()


def _array(_: type, plain: Any) -> npt.NDArray[Any]:
    kind, shape, data = plain
    return np.frombuffer(data, dtype=kind).reshape(shape)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a training to a file: tensors, numbers, texts, lists and dictionaries."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_whole(path, buffer.getvalue(), TrainingError)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state that `write_state` wrote; nothing is unpickled."""
    try:
        state = torch.load(path, weights_only=True)
    except FileNotFoundError:
        hint = "leave out --resume to start one"
        raise TrainingError(f"{path}: no training was interrupted here", hint) from None
    except Exception as error:  # noqa: BLE001 - a damaged file can raise any error
        problem = f"{path}: damaged state of a training ({type(error).__name__})"
        raise TrainingError(problem, "remove the file, and start again without --resume") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        problem = f"{path}: a state of another version"
        raise TrainingError(problem, "remove the file, and start again without --resume")
    return state

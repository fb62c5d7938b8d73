"""Several optimizers in one process: load, checkpoints, rollback, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic import ScalingAgent
from elastic.collectives.control_words import FIXED_WORDS, ControlWords, read_agreed_words
from elastic.sample_stream import MicroBatch, ScheduleRow
from elastic.state.portions import decode_metadata, encode_metadata
from elastic.state.state_tensors import TensorState
from elastic.step.batch_loader import ElasticLoader
from elastic.step.optimizer_turns import GradientOrigins, OptimizerTurns, StepUndo
from elastic.training_errors import CheckpointError, OutOfStepError, UsageError
from tests.training.groups import furthest
from tests.training.peers import CPU

DATA = TensorDataset(torch.arange(20.0, dtype=torch.float64).reshape(10, 2).sin())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.shared = nn.Parameter(torch.ones(3))
        self.double()


def pair() -> Pair:
    torch.manual_seed(1)
    return Pair()


def two(model: Pair) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    body = torch.optim.AdamW([*model.body.parameters(), model.shared], lr=0.02)
    head = torch.optim.SGD([model.shared, *model.head.parameters()], lr=0.1, momentum=0.9)
    return body, head


def losses(model: Pair, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(model.body(x)) * model.shared
    return hidden.square().mean(), (model.head(hidden) - 1).square().mean()


def loaded(
    agent: ScalingAgent, build: Callable[[Any], Any], batch: int = 10, **options: Any
) -> tuple[Any, Any, ElasticLoader]:
    model = pair()
    return agent.load(lambda: model, lambda _: build(model), DATA, batch_size=batch, **options)


@pytest.mark.parametrize("container", [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"body": a, "head": b},
    lambda a, _: (a,),
], ids=["tuple", "list", "dict", "tuple of one"])  # fmt: skip
def test_a_script_gets_back_what_it_built(agent: ScalingAgent, container: Any) -> None:
    built: list[Any] = []

    def build(model: Pair) -> Any:
        built.append(container(*two(model)))
        return built[0]

    _, optimizers, _ = loaded(agent, build)

    assert optimizers is built[0]


@pytest.mark.parametrize(("wrong", "text"), [
    (lambda _: (), "none, or one twice"),
    (lambda model: (two(model)[0],) * 2, "none, or one twice"),
    (lambda model: {"body": two(model)[0], "other": model}, "returned Pair"),
    (lambda model: (two(model)[0], two(pair())[1]), "outside of the model"),
])  # fmt: skip
def test_a_wrong_set_of_optimizers_is_refused(agent: ScalingAgent, wrong: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        loaded(agent, wrong)


def test_each_rate_follows_the_batch_by_its_own_rule(agent: ScalingAgent) -> None:
    _, (body, head), loader = loaded(agent, two, 5, lr=0.04, lr_doubling_steps=0)
    state, used = agent._training.lr_state, []
    for optimizer in (body, head):
        optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    state.follow_batch(20, 0)
    model = agent._training.tensors().model
    for _ in agent.epochs(1):
        for (x,) in loader:
            torch.stack(losses(model, x)).sum().backward()  # type: ignore[arg-type]
            body.step()
            head.step()
            break
        break

    assert [o.param_groups[0]["lr"] for o in (body, head)] == [0.04, 0.2]
    assert used == [0.04 * 2, 0.2 * 4]
    assert state.state_list() == [1.0, 2.0, 0, 0, 1.0, 4.0, 0, 0]


def test_schedulers_are_tracked_in_the_order_of_creation(agent: ScalingAgent) -> None:
    every = torch.optim.lr_scheduler
    _, (body, head), _ = loaded(agent, two)
    found = [every.StepLR(head, 3), every.ConstantLR(body), every.StepLR(head, 4)]

    assert agent._training._tracked._things == {
        f"scheduler {place}": each for place, each in enumerate(found, start=1)
    }


def by_name(model: Pair) -> dict[str, torch.optim.Optimizer]:
    return dict(zip(("body", "head"), two(model), strict=True))


def trained(agent: ScalingAgent, build: Callable[[Any], Any]) -> Any:
    model, built, loader = loaded(agent, build)
    optimizers = built.values() if isinstance(built, dict) else built
    for _ in agent.epochs(3):
        for (x,) in loader:
            for optimizer, loss in zip(optimizers, losses(model, x), strict=False):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
            for optimizer in optimizers:
                optimizer.step()
    return agent._training.checkpoint()


def test_a_checkpoint_has_all_optimizers_by_name(agent: ScalingAgent) -> None:
    several = trained(agent, by_name)
    one = trained(ScalingAgent.from_env(), lambda model: two(model)[:1])

    assert {"optimizer", "optimizers"} & set(several) == {"optimizers"}
    assert {"optimizer", "optimizers"} & set(one) == {"optimizer"}
    assert set(one["optimizer"]) == {"state", "param_groups"}
    again = ScalingAgent.from_env()
    loaded(again, by_name)
    again._training.load_checkpoint(several)
    back = again._training.checkpoint()
    assert again._training.tensors().digest() == agent._training.tensors().digest()
    assert str(back["optimizers"]) == str(several["optimizers"])
    for other, text in (
        (two, "has optimizers body, head, .* returned 0, 1"),
        (lambda m: two(m)[0], "returned 0"),
    ):
        different = ScalingAgent.from_env()
        loaded(different, other)
        with pytest.raises(CheckpointError, match=text):
            different._training.load_checkpoint(several)


def test_parameters_outside_of_the_model_are_saved_and_restored() -> None:
    temperatures = [nn.Parameter(torch.ones(1)) for _ in range(3)]

    def build(model: Pair, *, outside: int) -> torch.optim.Optimizer:
        given = [*model.parameters(), *temperatures[outside:]]
        return torch.optim.SGD(given, lr=0.1, momentum=0.9)

    agents = [ScalingAgent.from_env() for _ in range(3)]
    for agent, outside in zip(agents, (0, 0, 1), strict=True):
        loaded(agent, partial(build, outside=outside))
    with torch.no_grad():
        temperatures[0].fill_(0.25)
    kept = agents[0]._training.checkpoint()
    with torch.no_grad():
        temperatures[0].fill_(1.0)  # as a script begins anew

    agents[1]._training.load_checkpoint(kept)

    assert [one.item() for one in temperatures] == [0.25, 1.0, 1.0]
    with torch.no_grad():
        temperatures[0].fill_(1.0)
    assert agents[1]._training.restore_loaded()  # set by the script after load
    assert temperatures[0].item() == 0.25
    with pytest.raises(
        CheckpointError, match="has 3 parameters outside of the model, the script 2"
    ):
        agents[2]._training.load_checkpoint(kept)


def take(optimizers: Iterable[torch.optim.Optimizer], model: Pair, x: torch.Tensor) -> None:
    for optimizer, loss in zip(optimizers, losses(model, x), strict=True):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


def test_a_newcomer_allocates_the_state_of_several_optimizers() -> None:
    old, new = (TensorState(model, by_name(model)) for model in (pair(), pair()))
    x = DATA.tensors[0]
    for _ in range(3):
        take(old.optimizers, old.model, x)  # type: ignore[arg-type]
    new.adopt(decode_metadata(encode_metadata({"s": old.structure(CPU)}))["s"], CPU)
    for ours, theirs in zip(new.units(CPU), old.units(CPU), strict=True):
        for to, came in zip(ours, theirs, strict=True):
            to.copy_(came)

    assert new.digest() == old.digest()
    for state in (old, new):
        take(state.optimizers, state.model, x)  # type: ignore[arg-type]
    assert new.digest() == old.digest()


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
def test_a_rollback_restores_every_bit(agent: ScalingAgent, steps: int) -> None:
    model, optimizers, _ = loaded(agent, two)
    x = DATA.tensors[0]
    for _ in range(steps):
        take(optimizers, model, x)
    before = written(agent)
    undo = StepUndo(agent._training)
    for loss in losses(model, x):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for optimizer in (*optimizers, optimizers[0]):
        undo.save_copy(optimizer)
        optimizer.step()
    assert written(agent) != before

    undo.roll_back()

    assert written(agent) == before


def written(agent: ScalingAgent) -> list[tuple[str, list[float]]]:
    state = agent._training.tensors()
    kept = [list(entry) for entry in state.structure(CPU)]
    tensors = [tensor for unit in state.units(CPU) for tensor in unit]
    return [(str(kept), []), *((str(t.dtype), t.double().flatten().tolist()) for t in tensors)]


def micro_batch(step: int, *, first: bool = True, last: bool = True) -> MicroBatch:
    row = ScheduleRow(1, (1,), 0)
    return MicroBatch(step, 1, step - 1, step, [0], 1, 1, first, last, row)


def batch_of(turns: OptimizerTurns, step: int, sequence: str, optimizers: Any) -> bool | None:
    """Run backward passes (b) and steps of optimizers (0, 1) of a batch that breaks at x."""
    batch = micro_batch(step)
    turns.begin(batch, may_break=True)
    back = None
    for event in sequence:
        if event == "b":
            turns.backward_finished()
        elif event == "x":
            back = turns.roll_back()
        else:
            turns.save_copy(optimizers[int(event)])
    turns.conclude(batch)
    return back


def test_optimizers_are_copied_only_before_another_reduction(
    agent: ScalingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizers, _ = loaded(agent, two)
    kept: list[int] = []
    monkeypatch.setattr(
        StepUndo, "save_copy", lambda _, which: kept.append(optimizers.index(which))
    )
    turns = OptimizerTurns(agent._training, GradientOrigins([]))

    def copied(step: int, sequence: str) -> tuple[list[int], bool | None]:
        kept.clear()
        back = batch_of(turns, step, sequence, optimizers)
        return kept.copy(), back

    assert copied(1, "b0x") == ([0], True)  # of a batch that broke nothing is learnt
    assert copied(2, "b01") == ([0, 1], None)  # the first one that is whole
    assert copied(3, "b01") == ([], None)
    assert copied(4, "b0bx") == ([], False)  # one pass more than ever: the state is not whole
    assert copied(5, "b0b1") == ([], None)
    assert copied(6, "b0bx") == ([0], True)
    assert copied(7, "b0b1") == ([0], None)


ACCUMULATIONS = {
    "emptied in every batch": ("z0 z1 b s0 s1", []),
    "left over and emptied before it is used": ("z1 b s1 z0 b s0", []),
    "emptied to zeros": ("n0 n1 b s0 s1", []),
    "zeros behind what was left over": ("z1 b n0 b s0 s1", []),
    "not emptied": ("z0 b s0 s1", [1]),
    "a step before the backward pass": ("z0 s1 b s0 z1", []),
    "a step on what the last batch left": ("s1 z0 z1 b s0", [1]),
    "several passes of a batch": ("z0 z1 b b s0 s1", []),
}


@pytest.mark.parametrize(("events", "found"), ACCUMULATIONS.values(), ids=ACCUMULATIONS.keys())
def test_gradients_of_earlier_batches_are_found_at_their_use(events: str, found: list[int]) -> None:
    model = pair()
    optimizers = (
        torch.optim.SGD(model.body.parameters(), lr=0.1),
        torch.optim.SGD([model.shared, *model.head.parameters()], lr=0.1),
    )
    origins, seen = GradientOrigins(model.parameters()), set()
    for _ in range(3):
        origins.begin()
        for what, *which in events.split():
            if what == "b":
                losses(model, DATA.tensors[0])[1].backward()  # type: ignore[no-untyped-call]
                origins.backward_finished()
                continue
            place = int(which[0])
            if what == "s":
                seen |= {place} if origins.include_earlier(optimizers[place]) else set()
                optimizers[place].step()
            else:
                optimizers[place].zero_grad(set_to_none=what == "z")

    assert sorted(seen) == found


def test_different_numbers_of_backward_passes_are_out_of_step() -> None:
    for ahead in (1, 2):
        said = [ControlWords(1, step=8 if rank < ahead else 7).encode() for rank in range(3)]
        total = [0.0, *torch.tensor(said).sum(dim=0).tolist()]
        agreed = read_agreed_words(total[:FIXED_WORDS], 3)

        for own in (7, 8):
            with pytest.raises(OutOfStepError, match="the same number of backward passes"):
                agreed.check_in_step(3, own)


def in_passes(agent: ScalingAgent, events: str) -> dict[str, torch.Tensor]:
    model, optimizers, loader = loaded(agent, two)
    loader._sampler._bound = 4 if "p" in events else 10
    for _ in agent.epochs(3):
        for (x,) in loader:
            found = losses(model, x)
            for what, *which in events.removeprefix("p ").split():
                place = int(which[0])
                if what == "z":
                    optimizers[place].zero_grad()
                elif what == "b":
                    found[place].backward(retain_graph=True)  # type: ignore[no-untyped-call]
                else:
                    optimizers[place].step()
    return model.state_dict()


@pytest.mark.parametrize("events", ["z0 b0 z1 b1 s0 s1", "z0 z1 b1 s1 s0", "b1 b0 s0 s1 z0 z1"])
def test_passes_are_exact_if_optimizers_step_at_the_end(agent: ScalingAgent, events: str) -> None:
    assert (
        furthest(in_passes(agent, f"p {events}"), in_passes(ScalingAgent.from_env(), events))
        < 1e-12
    )


def test_passes_are_refused_if_an_optimizer_steps_between(agent: ScalingAgent) -> None:
    with pytest.raises(UsageError, match="raise max_local_batch"):
        in_passes(agent, "p z0 b0 s0 z1 b1 s1")


def test_a_steps_loss_is_that_of_its_first_backward_pass(agent: ScalingAgent) -> None:
    model, optimizers, loader = loaded(agent, two)
    for _ in agent.epochs(1):
        for (x,) in loader:
            first = losses(model, x)[0].item()
            take(optimizers, model, x)

        assert agent._training.losses.mean() == pytest.approx(first)


def weighed(agent: ScalingAgent, bound: int) -> dict[str, torch.Tensor]:
    model, optimizers, loader = loaded(agent, two)
    loader._sampler._bound = bound
    for _ in agent.epochs(3):
        for (x,) in loader:
            hidden = torch.tanh(model.body(x)) * model.shared
            each = hidden.square().mean(dim=1), (model.head(hidden) - 1).square().flatten()
            for optimizer, part, power in zip(optimizers, each, (1, 3), strict=True):
                weights = (1 + x[:, 0].abs()) ** power
                agent.weight(weights.sum().item())
                optimizer.zero_grad()
                ((weights * part).sum() / weights.sum()).backward(retain_graph=True)
            for optimizer in optimizers:
                optimizer.step()
    return model.state_dict()


def test_backward_passes_have_weights_of_their_own(agent: ScalingAgent) -> None:
    assert furthest(weighed(agent, 4), weighed(ScalingAgent.from_env(), 10)) < 1e-12

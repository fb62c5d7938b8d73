"""`ScalingAgent` without a cluster."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, TensorDataset

from elastic import ScalingAgent, hooks
from elastic.sample_stream import ScheduleRow
from elastic.step.batch_loader import ElasticLoader
from elastic.training_errors import UsageError
from elastic.usage_checks import metric_values, refuse_single_samples
from tests.support.builders import S0, S1, A, assignment, run

IDS = TensorDataset(torch.arange(10.0).reshape(10, 1))


def loaded(
    agent: ScalingAgent,
    data: Dataset[object] = IDS,
    lr: float | None = 0.5,
    of: Callable[[], nn.Module] = lambda: nn.Linear(1, 1),
) -> tuple[nn.Module, torch.optim.Optimizer, ElasticLoader]:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias, *_ = parameters
        groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1)

    return agent.load(of, optimizer, data, batch_size=4, lr=lr)


def test_a_second_loop_continues_the_epoch(agent: ScalingAgent) -> None:
    _, _, loader = loaded(agent)
    taken: list[float] = []
    for _ in agent.epochs(1):
        for (batch,) in loader:
            taken.extend(batch.flatten().tolist())
            break
        assert len(loader) == 3
        for (batch,) in loader:
            taken.extend(batch.flatten().tolist())

    assert sorted(taken) == list(range(10))


def test_the_rate_keeps_the_ratios_of_parameter_groups(agent: ScalingAgent) -> None:
    _, optimizer, _ = loaded(agent, lr=0.5)

    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]


def test_the_loss_is_seen_in_backward(agent: ScalingAgent) -> None:
    model, _, loader = loaded(agent)
    for _ in agent.epochs(1):
        for (batch,) in loader:
            (model(batch) * 0 + 3).mean().backward()
        assert agent._training.losses.mean() == 3.0

    assert agent._reducer is not None
    assert agent._reducer not in hooks._listeners


def epoch_sizes(
    agent: ScalingAgent, net: nn.Module, batch: int, data: Dataset[Any] = IDS, **options: Any
) -> list[int]:
    model, optimizer, loader = agent.load(
        lambda: net, lambda p: torch.optim.SGD(p, lr=0.1), data, batch_size=batch, **options
    )
    sizes = []
    for _ in agent.epochs(1):
        for (x,) in loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    return sizes


@pytest.mark.parametrize(("net", "batch", "options", "sizes"), [
    (nn.BatchNorm1d(1), 3, {}, [3, 3, 4]),  # the last step takes a remainder of one sample
    (nn.Linear(1, 1), 3, {}, [3, 3, 3, 1]),
    (nn.Linear(1, 1), 4, {"drop_last": True}, [4, 4]),
    (nn.Linear(1, 1), 16, {"drop_last": True}, [10]),
    (nn.Linear(1, 1), 8, {"drop_last": False, "shuffle": True, "sampler": None, "batch_sampler": None, "in_order": True}, [8, 2]),
])  # fmt: skip
def test_an_epoch_has_steps_of_these_sizes(
    agent: ScalingAgent, net: nn.Module, batch: int, options: dict[str, Any], sizes: list[int]
) -> None:
    assert epoch_sizes(agent, net, batch, **options) == sizes


def test_batch_norm_refuses_single_samples(agent: ScalingAgent) -> None:
    with pytest.raises(UsageError, match=r"raise batch_size to 2 or more, or .*GroupNorm"):
        epoch_sizes(agent, nn.BatchNorm1d(1), 1)
    with pytest.raises(UsageError, match=r"a step of 4 samples, .* raise max_local_batch to 2"):
        refuse_single_samples(4, 1, 2)


def test_batch_norm_refuses_a_batch_that_falls_to_one(agent: ScalingAgent) -> None:
    _, _, loader = loaded(agent, of=lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    for _ in agent.epochs(1):
        next(iter(loader))
        of_batch(agent, 1)
        with pytest.raises(UsageError, match="raise batch_size to 2 or more"):
            list(loader)


@pytest.mark.parametrize(
    "option",
    [{"shuffle": False}, {"sampler": [1]}, {"batch_sampler": [[1]]}, {"in_order": False}],
    ids=str,
)
def test_sampling_options_are_refused(agent: ScalingAgent, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        epoch_sizes(agent, nn.Linear(1, 1), 8, **option)


def of_batch(agent: ScalingAgent, batch: int) -> None:
    agent._training.schedule.announce([ScheduleRow(agent.step + 1, (batch,), 0)])


@pytest.mark.parametrize("batches", [(4, 4, 4), (1, 8, 3), (10, 2, 5), (7, 16, 1)], ids=str)
def test_a_step_schedule_ends_at_its_end_for_any_batch(
    agent: ScalingAgent, batches: tuple[int, int, int]
) -> None:
    every = torch.optim.lr_scheduler
    _, optimizer, loader = loaded(agent)
    total = 3 * len(loader)
    warm = every.LinearLR(optimizer, 0.1, total_iters=2)
    falling = every.CosineAnnealingLR(optimizer, total - 2)
    per_step = every.SequentialLR(optimizer, [warm, falling], [2])
    per_epoch = every.ConstantLR(optimizer, 1.0)
    for epoch in agent.epochs(3):
        of_batch(agent, batches[epoch])
        for _ in loader:
            optimizer.step()
            per_step.step()
        per_epoch.step()

    assert (per_step.last_epoch, falling.last_epoch, per_epoch.last_epoch) == (9, 7, 3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_an_epochs_length_follows_the_plan(agent: ScalingAgent) -> None:
    _, _, loader = loaded(agent)
    seen = []
    for epoch in agent.epochs(2):
        for place, _ in enumerate(loader):
            if (epoch, place) == (0, 0):
                of_batch(agent, 2)  # behind the step that is under way
            seen.append((place, len(loader), *agent.progress))

    assert seen == [
        (0, 5, 0.0, 0.0), (1, 4, 0.4, 0.2), (2, 4, 0.6, 0.3), (3, 4, 0.8, 0.4),
        (0, 5, 0.0, 0.5), (1, 5, 0.2, 0.6), (2, 5, 0.4, 0.7), (3, 5, 0.6, 0.8), (4, 5, 0.8, 0.9),
    ]  # fmt: skip
    assert agent.progress == (1.0, 1.0)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Counted(Endless):
    def __len__(self) -> int:
        return 3


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)

    def __len__(self) -> int:
        return 3


def on_two_devices(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    elsewhere = nn.Parameter(torch.zeros(1, device="meta"))
    return torch.optim.SGD([*parameters, elsewhere], lr=0.1)


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def load(agent: Any, model: Any = linear, optimizer: Any = sgd, data: Any = IDS) -> None:
    agent.load(model, optimizer, data, batch_size=2)


def test_a_builders_own_error_is_raised(agent: ScalingAgent) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        load(agent, optimizer=lambda parameters: sgd(parameters[0].missing))


def test_loader_options_can_be_read(agent: ScalingAgent) -> None:
    loader: Any = loaded(agent)[2]

    assert (loader.num_workers, loader.pin_memory, loader.timeout) == (0, False, 0)


@pytest.mark.parametrize(("name", "remedy"), [
    ("sampler", "leave set_epoch out"),
    ("batch_sampler", "leave set_epoch out"),
    ("batch_size", "agent.batch_size is the global batch, len("),
    ("drop_last", "call agent.load(..., drop_last=True)"),
    ("generator", "the job's seed decides"),
    ("other", "no attribute 'other'"),
])  # fmt: skip
def test_a_missing_loader_attribute_names_the_remedy(
    agent: ScalingAgent, name: str, remedy: str
) -> None:
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(loaded(agent)[2], name)


SHUFFLED = "shuffle=True.* in the order of train_set's __iter__; put weights and filters, and shu"
NO_MODEL = r"reads 'parameters' of its argument, which is no model; write .*lambda parameters:"
LAZY = r"layer '0' of the model \(LazyLinear\) has no shape yet; run one batch through"


@pytest.mark.parametrize(("wrong", "text"), [
    (lambda agent: load(agent, optimizer=on_two_devices), "several devices: cpu, meta"),
    (lambda agent: load(agent, model=lambda: nn.Linear(1, 1, dtype=torch.complex64)), "torch.view_as_real"),
    (lambda agent: list(agent.epochs(1)), r"agent.epochs\(\) was used before load.*call agent.load"),
    (lambda agent: agent.step, r"agent.step was used before load.*call agent.load"),
    (lambda agent: agent.batch_size, r"agent.batch_size was used before load.*call agent.load"),
    (lambda agent: agent.progress, r"agent.progress was used before load.*call agent.load"),
    (lambda agent: agent.carried, "agent.carried was used before load.*call agent.load"),
    (lambda agent: agent.weight(1), "outside of the loop"),
    (lambda agent: next(iter(loaded(agent)[2])), "loop over it in `for epoch in agent.epochs"),
    (lambda agent: (loaded(agent), loaded(agent)), r"load\(\) was called twice"),
    (lambda agent: (loaded(agent), list(agent.epochs(1)), list(agent.epochs(1))), r"epochs\(\) was called twice"),
    (lambda agent: agent.report(), "outside of an epoch"),
    (lambda agent: loaded(agent, Endless()), "give it __len__"),
    (lambda agent: loaded(agent, Pipe()), "a Pipe, .* or an IterableDataset"),
    (lambda agent: loaded(agent, TensorDataset(torch.zeros(0, 1))), "at least one sample"),
    (lambda agent: epoch_sizes(agent, linear(), 2, data=Counted(), shuffle=True), SHUFFLED),
    (lambda agent: loaded(agent, DataLoader(IDS)), "load.. its options"),
    (lambda agent: load(agent, model=nn.Linear(1, 1)), "build_model is a Linear, not a fun"),
    (lambda agent: load(agent, model=lambda p: p), r"build_model\(p\) is called with nothing"),
    (lambda agent: load(agent, model=lambda: None), "returned None, not one torch.nn.Module"),
    (lambda agent: load(agent, model=sgd, optimizer=linear), r"build_model\(parameters.*\) is called with nothing"),
    (lambda agent: load(agent, model=sgd(linear().parameters()), optimizer=linear()), "in the wrong order; write agent.load"),
    (lambda agent: load(agent, optimizer=sgd(linear().parameters())), "build_optimizer is a SGD, not a function"),
    (lambda agent: load(agent, optimizer=lambda model: sgd(model.parameters())), NO_MODEL),
    (lambda agent: load(agent, optimizer=lambda: None), r"build_optimizer\(\) is called with the model's parameters"),
    (lambda agent: load(agent, optimizer=lambda _: None), r"build_optimizer\(\) returned NoneType"),
    (lambda agent: load(agent, data=TensorDataset), "function or class: call it, and give a map-style data"),
    (lambda agent: loaded(agent, of=lambda: nn.Sequential(nn.LazyLinear(1), nn.ReLU())), LAZY),
    (lambda agent: passes_and_state(agent, 0), "max_local_batch 0 is below 1; raise it"),
])  # fmt: skip
def test_wrong_use_names_the_remedy(agent: ScalingAgent, wrong: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        wrong(agent)  # type: ignore[operator]


def test_some_properties_work_before_load(agent: ScalingAgent) -> None:
    assert (agent.rank, agent.world_size, agent.device.type) == (0, 1, "cpu")


def test_a_worker_knows_its_future_rank() -> None:
    second = ScalingAgent(assignment(run(A, on={S0: 32, S1: 32}), rank=1), None)

    assert (second.rank, second.world_size) == (1, 2)


def ones_model() -> nn.Module:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    return model


def passes_and_state(
    agent: ScalingAgent, bound: int | None
) -> tuple[list[int], dict[str, torch.Tensor]]:
    model, optimizer, loader = agent.load(
        ones_model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        IDS,
        batch_size=8,
        max_local_batch=bound,
        lr_scaling="none",
    )
    sizes = []
    for _ in agent.epochs(1):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            sizes.append(len(batch))
    return sizes, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("script", "job_file", "sizes", "said"), [
    (None, None, [8, 2], ""),
    (3, None, [3, 3, 2, 2], ""),
    (None, 3, [3, 3, 2, 2], ""),
    (4, 3, [3, 3, 2, 2], "[ones] max_local_batch 3 of the job file overrides the script's 4\n"),
])  # fmt: skip
def test_a_large_batch_is_taken_in_passes(
    capsys: pytest.CaptureFixture[str],
    script: int | None,
    job_file: int | None,
    sizes: list[int],
    said: str,
) -> None:
    how = {"batch_size": 8, "max_batch_size": 8, "max_local_batch": job_file, "seed": 0}
    whole = ScalingAgent.from_env(seed=0)
    _, expected = passes_and_state(whole, None)
    capsys.readouterr()
    managed = ScalingAgent(assignment(run(A, on={S0: 8}, **how)), None)
    taken, state = passes_and_state(managed, script)

    assert (taken, capsys.readouterr().err) == (sizes, said)
    torch.testing.assert_close(state, expected)
    for agent in (managed, whole):
        agent._reducer.close()  # type: ignore[union-attr]


def test_objects_tracked_before_load_are_restored(agent: ScalingAgent) -> None:
    counted = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    agent.track(counted=counted)
    loaded(agent)
    kept = agent._training.checkpoint()
    counted.n_averaged += 5

    agent._training.load_checkpoint(kept)

    assert int(counted.n_averaged) == 0


def test_a_model_with_synchronised_batch_normalisation_is_refused(agent: ScalingAgent) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.SyncBatchNorm(2))
    with pytest.raises(UsageError, match="has a SyncBatchNorm, which would not synchronise"):
        agent.load(
            lambda: model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            TensorDataset(torch.ones(4, 1)),
            batch_size=2,
        )


def test_a_data_set_that_grows_is_refused_in_the_next_epoch() -> None:
    class Growing(TensorDataset):
        def __len__(self) -> int:
            return size

    size = 4
    agent = ScalingAgent(assignment(run(A)), None)
    agent.load(
        lambda: nn.Linear(1, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        Growing(torch.ones(8, 1)),
        batch_size=2,
    )
    epochs = agent.epochs(3)
    next(epochs)
    size = 8

    with pytest.raises(UsageError, match=r"the data set has 8 samples, and had 4 at load\(\)"):
        next(epochs)
    agent._reducer.close()  # type: ignore[union-attr]


def test_a_parameter_group_that_is_added_is_not_sent() -> None:
    agent = ScalingAgent(assignment(run(A)), None)
    _, optimizer, _ = loaded(agent)
    agent._training.metadata()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(UsageError, match=r"2 with 2 parameters became 3 with 3; create all groups"):
        agent._training.metadata()
    agent._reducer.close()  # type: ignore[union-attr]


def test_a_negative_weight_is_refused(agent: ScalingAgent) -> None:
    batches = iter(loaded(agent)[2])
    next(agent.epochs(1))
    next(batches)

    with pytest.raises(UsageError, match=r"weight\(-1.0\) is negative or not a number"):
        agent.weight(-1)


def test_a_loader_after_report_is_refused(agent: ScalingAgent) -> None:
    _, _, loader = loaded(agent)
    for _ in agent.epochs(1):
        agent.report()
        with pytest.raises(UsageError, match=r"outside of an epoch: .* after report\(\)"):
            list(loader)


@pytest.mark.parametrize(("metrics", "text"), [
    ({f"m{number}": 0.5 for number in range(501)}, r"report\(\) got 501 metrics; give 500"),
    ({"n" * 101: 0.5}, "name it with 1 to 100 printable characters"),
    ({"": 0.5}, "name it with 1 to 100 printable characters"),
    ({"\x1b[31m": 0.5}, r"named '\\x1b\[31m'"),
    ({"huge": 10**400}, r"report\(huge=...\) got int"),
    ({"accuracy": "good"}, r"report\(accuracy=...\) got str"),
], ids=["many", "long name", "no name", "escapes", "no float", "text"])  # fmt: skip
def test_unusable_metrics_are_refused(metrics: dict[str, float], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        metric_values(metrics)


def test_schedulers_and_scalers_are_found(agent: ScalingAgent) -> None:
    every = torch.optim.lr_scheduler

    _, optimizer, _ = loaded(agent)

    class Own(every.LRScheduler):  # made later, and its base's constructor is not called
        def __init__(self, inner: every.LRScheduler) -> None:
            self.inner = inner
            self.calls = 3

    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    made = [every.ConstantLR(optimizer), every.StepLR(optimizer, 3)]
    every.StepLR(other, 3)
    whole = every.SequentialLR(optimizer, made, [2])
    found = [*made, whole, every.ReduceLROnPlateau(optimizer), Own(whole)]
    scaler, second = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for each in (scaler, scaler, torch.amp.GradScaler("cpu", enabled=False), second):
        each.scale(torch.ones(()))

    tracked = agent._training._tracked
    assert tracked._things == {
        **{f"scheduler {place}": each for place, each in enumerate(found, start=1)},
        "scaler 1": scaler,
        "scaler 2": second,
    }
    assert tracked.states()["scheduler 5"] == {"calls": 3}


class Pickled:
    def state_dict(self) -> dict[str, object]:
        return {"f": Pickled}

    def load_state_dict(self, _: object) -> None: ...


def all_that_groups_refuse(agent: ScalingAgent, *, sparse: bool) -> None:
    model, optimizer, loader = agent.load(
        lambda: nn.Sequential(nn.Embedding(10, 1, sparse=sparse), nn.Linear(1, 1)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        TensorDataset(torch.arange(4)),
        batch_size=2,
    )
    agent.track(odd=Pickled())
    for _ in agent.epochs(2):
        for (batch,) in loader:
            nn.functional.mse_loss(model(batch), torch.ones(2, 1), reduction="sum").backward()
        optimizer.step()
        model[1].bias.requires_grad = False  # type: ignore[index]


def test_a_script_alone_gets_each_warning_once(
    agent: ScalingAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    all_that_groups_refuse(agent, sparse=True)

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "[ones] a cluster refuses this: the tracked state of odd cannot be transferred",
        "[ones] a cluster refuses this: the loss is a sum over the batch",
        "[ones] a cluster refuses this: the model has sparse gradients",
        "[ones] a cluster refuses this: the script accumulates gradients over several batches",
        "[ones] a cluster refuses this: the trained parameters changed after load()",
    ]


def test_a_cluster_raises_refusals() -> None:
    managed = ScalingAgent(assignment(run(A)), None)
    with pytest.raises(UsageError, match="the tracked state of odd"):
        all_that_groups_refuse(managed, sparse=False)

    managed._reducer.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(("loss_of", "said"), [
    (lambda out: out.mean() * float("nan"), ["epoch 1: the training loss is nan"]),
    (None, ["epoch 1: no backward() of a scalar loss was seen"]),
    (lambda out: out.mean(), []),
])  # fmt: skip
def test_a_loop_that_learns_nothing_is_logged_once(
    loss_of: Callable[[torch.Tensor], torch.Tensor] | None,
    said: list[str],
    agent: ScalingAgent,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, _, loader = loaded(agent)

    for _ in agent.epochs(3):
        for (inputs,) in loader:
            out = model(inputs)
            if loss_of is not None:
                loss_of(out).backward()

    assert re.findall(r"epoch \d+: [\w ()]+", capsys.readouterr().err) == said


@pytest.mark.slow
def test_an_agent_that_is_dropped_leaves_no_process_that_loads_data() -> None:
    def train() -> None:
        agent = ScalingAgent.from_env()
        data = TensorDataset(torch.zeros(8, 2))
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        model, optimizer, loader = agent.load(
            lambda: nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), data,
            batch_size=4, **options,
        )  # fmt: skip
        for _ in agent.epochs(1):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).mean().backward()
                optimizer.step()

    before = set(psutil.Process().children())
    train()
    gc.collect()

    assert set(psutil.Process().children()) == before

"""Hugging Face's Trainer as an elastic job: real workers, against one plain loop of torch."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from elastic.training_errors import UsageError
from elastic.transformers import ElasticMixin, ElasticTrainer
from tests.training.frameworks.jobs import (
    BATCH,
    EPOCHS,
    STEPS,
    PlainLoop,
    batches,
    computing_in,
    dies_of,
    each_sample_once,
    job,
    toy_data,
)  # fmt: skip
from tests.training.frameworks.same_tests import *  # noqa: F403
from tests.training.frameworks.same_tests import GROWN_AND_SHRUNK, Framework
from tests.training.groups import Crew, furthest

pytestmark = pytest.mark.slow

ARGUMENTS = {
    "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "learning_rate": 0.05,
    "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 5, "max_grad_norm": 0.3,
    "logging_steps": 1, "save_strategy": "epoch", "eval_strategy": "epoch", "report_to": "none",
    "use_cpu": True,
}  # fmt: skip

SCRIPT = """
from transformers import TrainerCallback, TrainingArguments
from elastic.transformers import ElasticTrainer

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, place):
        return {"x": inputs[place], "labels": targets[place]}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x, labels):
        made = self.layers(x)
        return {"loss": nn.functional.mse_loss(made, labels), "logits": made}

class Gate(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        wait_at_gate(state.global_step)

    def on_save(self, args, state, control, **_):
        say(saved=state.global_step, rank=agent.rank)

MODEL, DATA, COLLATE = Net, Pairs(), None
OPTIONS = {}
CALLBACKS = []
"""

TRAIN = """
arguments = TrainingArguments(output_dir=str(HOME / "out"), **ARGUMENTS)
trainer = ElasticTrainer(
    model=MODEL(), args=arguments, train_dataset=DATA, eval_dataset=DATA, data_collator=COLLATE,
    callbacks=[Gate(), *CALLBACKS], agent=agent, lr_scaling="none", **OPTIONS,
)
result = trainer.train()
history = [entry for entry in trainer.state.log_history if "loss" in entry]
say(
    result=result.training_loss, step=result.global_step, epoch=trainer.state.epoch,
    losses=[entry["loss"] for entry in history], logged=[entry["step"] for entry in history],
    rates=[entry["learning_rate"] for entry in history], rank=agent.rank,
    rate=trainer.lr_scheduler.get_last_lr()[0], digest=digest(trainer.model),
)
if agent.rank == 0:
    torch.save(trainer.model.state_dict(), HOME / "final.pt")
"""


def text(*changes: str, **arguments: Any) -> str:
    whole = ARGUMENTS | arguments
    return SCRIPT + "".join(changes) + TRAIN.replace("**ARGUMENTS", f"**{whole!r}")


def plain_loop(model: nn.Module, loss: Any, optimizer: Any = None, **options: Any) -> PlainLoop:
    from transformers import get_cosine_schedule_with_warmup  # noqa: PLC0415 - dear

    named = dict(model.named_parameters())
    decayed = [name for name in named if "bias" not in name and "ln_" not in name]
    groups = [
        {"params": [named[name] for name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    made = (optimizer or torch.optim.AdamW)(groups, lr=0.05)
    one = PlainLoop(model, made, get_cosine_schedule_with_warmup(made, 5, STEPS), loss, **options)
    one.train(batches())
    return one


def build_plain(dtype: torch.dtype = torch.float64) -> PlainLoop:
    """Train one plain loop; in float32 with autocast."""
    with computing_in(dtype):
        torch.manual_seed(3)
        model = nn.Module()
        model.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
        inputs, targets = (values.to(dtype) for values in toy_data())

        def loss(model: Any, ids: list[int]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
                return nn.functional.mse_loss(model.layers(inputs[ids]), targets[ids])

        return plain_loop(model, loss)


plain = functools.cache(build_plain)


def ends_as(made: Crew, one: PlainLoop) -> dict[str, Any]:
    each_sample_once(made)
    assert furthest(made.final(), one.model.state_dict()) < one.within
    ended = [word for word in made.words() if "result" in word]
    assert len({word["digest"] for word in ended}) == 1
    for word in ended:
        assert (word["step"], word["epoch"], word["rate"]) == (STEPS, EPOCHS, pytest.approx(0))
        assert word["logged"] == list(range(1, STEPS + 1))
        assert word["losses"] == pytest.approx(one.losses, rel=1e3 * one.within)
        assert word["rates"] == pytest.approx(one.rates)
        assert word["result"] == pytest.approx(sum(one.losses) / STEPS, rel=1e3 * one.within)
    return next(word for word in ended if word["rank"] == 0)


def test_a_trainer_in_a_changing_group_trains_as_one_loop(tmp_path: Path) -> None:
    with job(tmp_path, text(), gates=(4, 15, 26)) as made:
        epochs = made.through(*GROWN_AND_SHRUNK)

        ends_as(made, plain())
        assert [list(epoch.facts.metrics) for epoch in epochs] == [["eval_loss"]] * EPOCHS
        saved = [(word["rank"], word["saved"]) for word in made.words() if "saved" in word]
        assert sorted({step for rank, step in saved if rank == 0}) == [6, 12, 18, 24, 30, 36]
        folders = {folder.name for folder in (tmp_path / "out").iterdir()}
        assert folders == {f"checkpoint-{step}" for step in range(6, 37, 6)}


def test_only_adapters_import_frameworks() -> None:
    code = "import sys, elastic.launch, elastic.worker.zygote; print(sorted(sys.modules))"
    names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    found = {name for name in ("accelerate", "lightning", "transformers") if f"'{name}" in names}
    assert "'elastic.agent'" in names
    assert found == set()


def test_a_paused_job_keeps_its_counts_and_schedule(tmp_path: Path) -> None:
    with job(tmp_path, text(), gates=(9,)) as made:
        made.through((6, 6), "pause", (4, 8))

        ends_as(made, plain())


def test_accumulated_gradients_are_passes_of_one_step(tmp_path: Path) -> None:
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    with job(tmp_path, text(**accumulated), gates=(4, 15), bound=4) as made:
        made.through((BATCH,), (7, 5), (3, 3, 6))

        ends_as(made, plain())


NARROW = """
narrow = set()

class Narrow(Net):
    def __init__(self):
        super().__init__()
        self.layers.register_forward_hook(lambda module, x, made: narrow.add(str(made.dtype)))

MODEL = Narrow
"""


TOKENS = """
from transformers import GPT2Config, GPT2LMHeadModel

def build():
    torch.manual_seed(3)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **off))
    model.loss_type = "ForCausalLM"  # unsaid, the trainer counts the first token too
    return model

class Texts(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(11, (SIZE, 8), generator=generator)
        self.labels = self.ids.clone()
        for place in range(SIZE):  # of one to seven tokens that count; none in some
            self.labels[place, place % 8 + (place > 50):] = -100

    def __len__(self):
        return SIZE

    def __getitem__(self, place):
        return {"input_ids": self.ids[place], "labels": self.labels[place]}
"""


@functools.cache
def plain_tokens(smoothing: float) -> PlainLoop:
    names: dict[str, Any] = {"torch": torch, "SIZE": 61}
    with computing_in(torch.float64):
        exec(TOKENS, names)  # noqa: S102 - the part of the script that builds
        texts = names["Texts"]()

        def loss(model: Any, ids: list[int]) -> torch.Tensor:
            logits = model(input_ids=texts.ids[ids]).logits[:, :-1].reshape(-1, 11)
            labels = texts.labels[ids][:, 1:].reshape(-1)
            summed = nn.functional.cross_entropy(
                logits, labels, label_smoothing=smoothing, reduction="sum"
            )
            return summed / labels.ne(-100).sum().clamp(min=1)

        # The library takes losses in float32.
        return plain_loop(names["build"](), loss, torch.optim.SGD, within=1e-6, clip=9.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_token_loss_is_a_mean_over_the_global_batch(tmp_path: Path, smoothing: float) -> None:
    changes = TOKENS.replace("SIZE", "61") + "MODEL, DATA = build, Texts()\n"
    source = text(changes, label_smoothing_factor=smoothing, optim="sgd", max_grad_norm=9.0)
    with job(tmp_path, source, gates=(4, 15), bound=5) as made:
        made.through((BATCH,), (4, 8), (3, 3, 6))

        ends_as(made, plain_tokens(smoothing))


STOPPED = """
from transformers import EarlyStoppingCallback

class Worse:
    def __init__(self):
        self.value = 0.0

    def __call__(self, predicted):
        self.value += 1.0 if agent.rank else -1.0  # rank 1 would go on for ever
        return {"score": self.value}

OPTIONS = {"compute_metrics": Worse()}
CALLBACKS = [EarlyStoppingCallback(early_stopping_patience=2)]
"""


def test_rank_0_decides_whether_a_callback_stops_the_job(tmp_path: Path) -> None:
    best = {"metric_for_best_model": "score", "greater_is_better": True}
    with job(tmp_path, text(STOPPED, load_best_model_at_end=True, **best)) as made:
        epochs = made.through((6, 6))

        assert [epoch.epoch for epoch in epochs] == [1, 2, 3]
        assert [epoch.facts.metrics["eval_score"] for epoch in epochs] == [-1.0, -2.0, -3.0]
        assert {word["step"] for word in made.words() if "result" in word} == {18}


REFUSED = {
    "its own checkpoints": ("train()", "train(resume_from_checkpoint=True)", "automatically"),
    "a second training": ("result.t", "trainer.train() and result.t", "called twice"),
}
REFUSED_ARGUMENTS = {
    "another order": ({"train_sampling_strategy": "sequential"}, "shuffled by the job's"),
    "a batch that is searched": ({"auto_find_batch_size": True}, "max_local_batch"),
    "tokens of one worker": ({"include_num_input_tokens_seen": "all"}, "its own share"),
}


@pytest.mark.parametrize(
    ("arguments", "said"), REFUSED_ARGUMENTS.values(), ids=REFUSED_ARGUMENTS.keys()
)
def test_inexact_arguments_are_refused_with_a_remedy(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with job(tmp_path, text(**arguments), epochs=1) as made:
        assert said in dies_of(made, BATCH)


class OwnSampler(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler([1.0, 0.0], 2)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, sampler=WeightedRandomSampler([1.0, 0.0], 2))


class LateLoader(ElasticTrainer):
    get_train_dataloader = OwnLoader.get_train_dataloader


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (type("Sampled", (ElasticMixin, OwnSampler), {}), "_get_train_sampler"),
        (type("Loaded", (ElasticMixin, OwnLoader), {}), "get_train_dataloader"),
        (LateLoader, "get_train_dataloader"),
    ],
)
def test_own_choices_of_samples_are_refused(kind: Any, method: str, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    with pytest.raises(
        UsageError, match=f"an own {method} cannot be kept exact; weight the losses"
    ):
        kind(model=torch.nn.Linear(1, 1), args=args, train_dataset=[1, 2])


BEFORE = """
import torch
from transformers import BertConfig, BertForSequenceClassification

sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForSequenceClassification(BertConfig(vocab_size=11, max_position_embeddings=8, **sizes))
ids = torch.randint(1, 11, (20, 8))
train_set = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
eval_set = train_set[:6]
"""
LOADS = {
    "dataloader_num_workers": 2,
    "dataloader_multiprocessing_context": "fork",
    "dataloader_persistent_workers": True,
}
FRAMEWORK = Framework(
    module="elastic.transformers",
    heading="Hugging Face Trainer",
    script=text(),
    narrow=text(NARROW, bf16=True, **LOADS),
    plain_narrow=lambda: build_plain(torch.float32).model,
    ends=lambda made: ends_as(made, plain()),
    before=BEFORE,
    after="print('ended', trainer.state.global_step, sorted(trainer.state.log_history[-2])[0])",
    printed="ended 9 epoch",
    refused=REFUSED,
)


@pytest.fixture(scope="module")
def framework() -> Framework:
    return FRAMEWORK

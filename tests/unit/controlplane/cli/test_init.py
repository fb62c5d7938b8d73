"""ones init: facts of scripts of many forms, changes to them, remarks, and the job file."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.cli.init import job_file, job_name
from controlplane.cli.init_script.port_script import Port, changed_lines, port
from controlplane.cli.init_script.remarks import OWN_RATE, SIDE_BY_SIDE, SUMMED, summed_losses
from controlplane.cli.init_script.script_facts import Facts, look
from controlplane.cli.init_script.syntax import Source
from controlplane.client.job_file import load_job
from schemas.jobs import JobSpec, StopRule
from tests.support.commands import ones

SCRIPTS = Path(__file__).parent / "scripts"
ADDED = {
    "plain": [
        "from elastic import ScalingAgent",
        "agent = ScalingAgent.from_env()",
        "build_model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))",
        "build_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
        "model, optimizer, loader = agent.load(build_model, build_optimizer, train_set, batch_size=BATCH)",
        "for epoch in agent.epochs(EPOCHS):",
    ],
    "arguments": [
        "from elastic import ScalingAgent",
        "    agent = ScalingAgent.from_env()",
        "    build_model = lambda: Net(width=16)",
        "    build_optimizer = lambda parameters: optim.Adadelta(parameters, lr=args.lr)",
        "    model, optimizer, train_loader = agent.load(build_model, build_optimizer, dataset(160), **train_kwargs)",
        "    for epoch in (1 + n for n in agent.epochs(args.epochs)):",
    ],
    "distributed": [
        "from elastic import ScalingAgent",
        "    local_rank = 0",
        "    agent = ScalingAgent.from_env()",
        "    if agent.rank == 0:",
        "    build_model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))",
        "    build_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)",
        "    model, optimizer, loader = agent.load(build_model, build_optimizer, train_set, batch_size=16, num_workers=0)",
        "    for epoch in agent.epochs(2):",
        "        if agent.rank == 0:",
        '            torch.save(model.state_dict(), "last.pt")',
    ],
    "schedule": [
        "from elastic import ScalingAgent",
        "    for epoch in agent.epochs(epochs):",
        "    agent = ScalingAgent.from_env()",
        "    build_model = lambda: nn.Linear(8, 1)",
        "    build_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=CONFIG_LR)",
        "    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))",  # moved up
        "    net, opt, batches = agent.load(build_model, build_optimizer, data, batch_size=12, drop_last=True)",
    ],
    "finetune": [
        "from elastic import ScalingAgent",
        "    agent = ScalingAgent.from_env()",
        "    def build_model():",
        "        model = Backbone()",
        "        for parameter in model.parameters():",
        "            parameter.requires_grad = False",
        "        model.fc = nn.Linear(16, 2)",
        "        return model",
        "    build_optimizer = lambda parameters: torch.optim.Adam(filter(lambda p: p.requires_grad, parameters), lr=learning_rate)",
        "    model, optimizer, train_loader = agent.load(build_model, build_optimizer, TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size)",
        "    for epoch in agent.epochs(epochs):",
    ],
    "groups": [
        "from elastic import ScalingAgent",
        "agent = ScalingAgent.from_env()",
        "model, optimizer, loader = agent.load(lambda: model, lambda _: optimizer, TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)",
        "for epoch in agent.epochs(2):",
    ],
    "no_trainer": [
        "from elastic import ScalingAgent",
        "    agent = ScalingAgent.from_env()",
        "    model, optimizer, train_dataloader = agent.load(lambda: model, lambda _: optimizer, train_dataset, batch_size=args.per_device_train_batch_size)",
        "    for epoch in agent.epochs(args.num_train_epochs):",
    ],
    "trainer": [
        "from transformers import TrainingArguments",
        "from elastic.transformers import ElasticTrainer",
        "    trainer = ElasticTrainer(",
    ],
    "lightning_module": [
        "from elastic.lightning import ElasticStrategy",
        "        strategy=ElasticStrategy(),",
        "        devices=1,",
    ],
    "accelerator": [
        "from elastic.accelerate import ElasticAccelerator",
        "accelerator = ElasticAccelerator(gradient_accumulation_steps=2)",
        "for epoch in (1 + n for n in accelerator.epochs(4)):",
    ],
    "own_agent": [
        "from elastic import ScalingAgent",
        "    scaling_agent = ScalingAgent.from_env()",
        "    build_model = lambda: nn.Linear(4, 1)",
        "    build_optimizer = lambda parameters: torch.optim.RMSprop(parameters, 0.01)",
        "    model, optimizer, loader = scaling_agent.load(build_model, build_optimizer, TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)",
        "    for epoch in scaling_agent.epochs(2):",
    ],
}  # fmt: skip
SMALL = """
from torch.utils.data import DataLoader
model = Net()
optimizer = SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
for epoch in range(5):
    for batch in loader:
        loss(model(batch)).backward()
    val_loss = evaluate(model)
"""


def text_of(name: str) -> str:
    return (SCRIPTS / f"{name}.py").read_text()


def facts_of(text: str) -> Facts:
    return look(Source(text))


def ported(text: str) -> Port:
    return port(facts_of(text))


@pytest.mark.parametrize("name", ADDED)
def test_a_script_is_ported_with_these_lines(name: str) -> None:
    diff = ported(text_of(name)).diff(text_of(name), f"{name}.py")

    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and line[1:2] != "+"]
    assert added == ADDED[name]
    assert changed_lines(diff) == len(added)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("plain", (16, 0.05, 3)), ("arguments", (32, 1.0, 4)), ("distributed", (16, 0.003, 2)),
        ("schedule", (12, 0.1, 3)), ("finetune", (20, 0.01, 2)), ("own_agent", (8, 0.01, 2)),
        ("groups", (8, 0.01, 2)), ("no_trainer", (8, 5e-5, 3)), ("endless", (None, 0.1, None)),
        ("trainer", (32, 0.001, 2)), ("lightning_module", (32, 0.05, 3)),
        ("accelerator", (32, 0.003, 4)),
    ],
)  # fmt: skip
def test_batch_rate_and_epochs_are_read_from_constants_defaults_and_options(
    name: str, numbers: tuple[int | None, float | None, int | None]
) -> None:
    facts = facts_of(text_of(name))

    assert (facts.batch_size, facts.lr, facts.epochs) == numbers


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("endless", [
            "no `NAME = DataLoader(...)` is iterated for training: pass the data to agent.load()",
            "line 11: `while step < 100:` counts steps, whose batch changes on a cluster: write `for epoch in agent.epochs(N)` around a loop over the loader; stop = { samples = STEPS x BATCH } in the job file ends it after as many samples"]),
        ("torchrun", [
            "line 33: `for epoch in range(max_epochs):` trains in other functions: pass them what agent.load() returns, and loop over agent.epochs(N) there",
            "line 16: `DDP(...)` away from the optimizer: leave it out: the agent's group reduces gradients"]),
        ("gan", [
            "line 14: a second optimizer, `optimizerG` beside `optimizerD`: let build_model return one nn.ModuleDict and build_optimizer a tuple; docs/exactness/optimizers.md shows such a loop"]),
    ],
)  # fmt: skip
def test_obstacles_to_a_port_are_named_with_their_lines(name: str, lines: list[str]) -> None:
    found = ported(text_of(name))

    assert (found.text, found.missing) == ("", lines)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("model = Net()", "from elastic import ScalingAgent\nmodel = Net()", "the script imports the library already"),
        ("model = Net()", "def make():\n    global model\n    model = Net()\nmake()", "`model` is made in another block"),
        ("batch_size=8)", "batch_sampler=mine)", "a batch sampler"),
        ("batch_size=8)", "batch_size=8, sampler=Weighted(data))", "a sampler of the script's own"),
        ("lr=0.1)", "lr=0.1 / len(loader))\n", ""),
        ("model = Net()", "model = Net(); model.double()", "give each statement a line of its own"),
        ("model.parameters()", "[model.bias, *model.parameters()]", ""),
        ("batch_size=8)", "batch_size=8)\nmodel = DDP(model)", ""),
        ("loader = Data", "print(optimizer.state)\nloader = Data", ""),
        ("for epoch in range(5)", "dist.init_process_group()\nfor epoch in range(5)", ""),
        ("    val_loss", "    dist.all_reduce(x)\n    val_loss", ""),
    ],
)  # fmt: skip
def test_an_unusual_form_is_named_and_common_forms_are_ported(
    before: str, after: str, why: str
) -> None:
    found = ported(SMALL.replace(before, after))

    assert (bool(found.text), why in " ".join(found.missing)) == (not why, True)


def test_a_call_that_needs_torchs_own_process_group_is_named() -> None:
    text = SMALL.replace("for epoch in", "dist.init_process_group()\nfor epoch in").replace(
        "    val_loss", "    dist.all_reduce(x)\n    val_loss"
    )

    assert (ported(text).text, ported(text).missing) == ("", [
        "line 10: dist.all_reduce() needs torch's own process group, which does not exist: remove it; agent.report() takes the numbers of rank 0"
    ])  # fmt: skip


def test_a_loader_that_the_optimizer_needs_cannot_be_made_by_load() -> None:
    lines = SMALL.strip().splitlines()
    lines[1:4] = [lines[3], lines[1], "rate = 1 / len(loader)", lines[2].replace("0.1", "rate")]

    assert ported("\n".join(lines)).missing == [
        "line 5: it needs rate, which exists only after agent.load() has returned"
    ]


def test_a_metric_is_reported_where_six_lines_allow_it() -> None:
    assert (
        ported(SMALL).text
        == """
from torch.utils.data import DataLoader
from elastic import ScalingAgent
agent = ScalingAgent.from_env()
build_optimizer = lambda parameters: SGD(parameters, lr=0.1)
model, optimizer, loader = agent.load(Net, build_optimizer, data, batch_size=8)
for epoch in agent.epochs(5):
    for batch in loader:
        loss(model(batch)).backward()
    val_loss = evaluate(model)
    agent.report(val_loss=val_loss)
"""
    )
    seventh = ported(SMALL.replace("Net()", "Net(1)"))
    assert "agent.report" not in seventh.text
    assert seventh.advice == [
        "`agent.report(val_loss=val_loss)` at the end of each epoch makes it a metric of the job"
    ]


def test_a_script_with_functions_that_build_has_them_called() -> None:
    text = SMALL.replace("SGD(model.parameters(), lr=0.1)", "make_adam(model.parameters())")
    own = f"def build_optimizer(parameters):\n    return 0\n{SMALL}"

    assert "agent.load(Net, make_adam, data, batch_size=8)" in ported(text).text
    assert "\nmake_optimizer = lambda parameters: SGD(parameters, lr=0.1)\n" in ported(own).text


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("    val_loss", "    torch.save(model, path)\n    val_loss",
         "line 9: every worker runs torch.save(): guard it with `if agent.rank == 0:`"),
        ("    val_loss", "    if rank == 0:\n        torch.save(model, path)\n    val_loss", ""),
        ("    val_loss", "        if n > 9:\n            break\n    val_loss",
         "line 9: the batch loop ends early: all workers have to leave it in the same step"),
        ("    val_loss", "    if patience:\n        break\n    val_loss", ""),
    ],
)  # fmt: skip
def test_lines_that_a_group_runs_differently_are_named(before: str, after: str, line: str) -> None:
    advice = ported(SMALL.replace(before, after)).advice

    assert [said for said in advice if said.startswith("line")] == [line] * bool(line)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("loss(model(batch))", 'nll_loss(model(batch), reduction="sum")', [f"line 8: {SUMMED}"]),
        ("model = Net()", 'loss = Loss(reduction="sum")\nmodel = Net()', [f"line 3: {SUMMED}"]),
        ("val_loss = evaluate(model)", "val_loss = mse(model(x), y, reduction='sum').item()", []),
        ("SGD(model", "LBFGS(model", [
            "line 4: LBFGS evaluates its closure several times in a step, which is refused: use an optimizer that evaluates it once, such as SGD or Adam"]),
        ("Net()", "Embedding(9, 2, sparse=True)", [
            "line 3: sparse gradients are refused in a group: leave `sparse=True` out"]),
        ("model = Net()", "class Text(IterableDataset):\n    pass\nmodel = Net()", [
            "line 3: Text has no length, which is refused: give it a __len__ that returns the samples of one pass"]),
        ("    val_loss", "        if n % 4 == 0:\n            optimizer.step()\n    val_loss", [
            "line 9: a step for several batches is refused: step in each, and raise batch_size; a share above max_local_batch is computed in several passes"]),
        ("        loss(", "        for g in optimizer.param_groups:\n            g['lr'] = rate(step)\n        loss(", [f"line 9: {OWN_RATE}"]),
        ("model = Net()", "from .parts import Net\nmodel = Net()", [
            "line 3: a relative import, but a job's script is run as a file of no package: write `from parts import Net`, with the module beside the script"]),
        ("in loader", "in zip(loader, other)", []),
        ("        loss(", "        warm_up(step)\n        loss(", [f"line 13: {OWN_RATE}"]),
        ("    val_loss", "    optimizer.param_groups[0]['lr'] = rate(epoch)\n    val_loss", []),
    ],
)  # fmt: skip
def test_lines_that_the_library_refuses_are_named_with_a_remedy(
    before: str, after: str, lines: list[str]
) -> None:
    function = "\ndef warm_up(step):\n    optimizer.param_groups[0]['lr'] = rate(step)\n"

    assert ported(SMALL.replace(before, after, 1) + function).refused == lines


@pytest.mark.parametrize(
    ("loop", "stop"),
    [("for step in range(500)", "stop = { samples = 4000 }  # 500 steps; or"), ("while True", "# stop = ")],
)  # fmt: skip
def test_a_loop_that_counts_steps_is_named_and_its_steps_end_the_job(loop: str, stop: str) -> None:
    head = SMALL.partition("for epoch")[0]
    body = "    batch = next(it)\n    loss(model(batch)).backward()\n    optimizer.step()\n"
    facts = facts_of(f"{head}{loop}:\n{body}")

    assert (port(facts).text, facts.epochs) == ("", None)
    assert port(facts).missing[0].startswith(f"line 6: `{loop}:` counts steps, whose batch changes")
    assert f"\n{stop}" in job_file(facts, Path("/a/train.py"), "train.py")


HF = """
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
args = TrainingArguments("out")
trainer = Trainer(model=model, args=args)
trainer.train()
"""


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ('"out"', (8, 5e-5, 3, None)),
        ('"out", per_device_train_batch_size=4, learning_rate=0.1', (4, 0.1, 3, None)),
        ('"out", num_train_epochs=1.5', (8, 5e-5, None, None)),
        ('"out", max_steps=100', (8, 5e-5, None, 100)),
        ('"out", learning_rate=0.1, **more', (None, 0.1, None, None)),
        ("*found", (8, 5e-5, 3, None)),
    ],
)
def test_numbers_of_training_arguments_have_the_defaults_of_transformers(
    arguments: str, numbers: tuple[float | None, ...]
) -> None:
    facts = facts_of(HF.replace('"out"', arguments))

    assert (facts.batch_size, facts.lr, facts.epochs, facts.steps) == numbers


def test_a_derived_trainer_gets_the_mixin_and_other_trainers_are_named() -> None:
    own = HF.replace("trainer = Trainer(", "class Mine(Trainer):\n    pass\ntrainer = Mine(")
    other = HF.replace("= Trainer(", "= Seq2SeqTrainer(")

    assert "\nclass Mine(ElasticMixin, Trainer):\n" in ported(own).text
    assert ported(other).missing == [
        "line 4: `Seq2SeqTrainer(...)` has no adapter: define `class Mine(ElasticMixin, Seq2SeqTrainer)` with ElasticMixin of elastic.transformers, and use Mine instead; docs/frameworks.md shows how"
    ]


PL = """
import lightning as L
trainer = L.Trainer(max_epochs=3, val_check_interval=1.0)
trainer.fit(module, loader)
"""


LEAVE = "is refused, leave it out:"


@pytest.mark.parametrize(
    ("script", "before", "after", "line"),
    [
        (HF, '"out"', '"out", fsdp="full_shard"', f"line 3: `fsdp` {LEAVE} the agent's group reduces gradients"),
        (HF, '"out"', '"out", fsdp="", auto_find_batch_size=False', ""),
        (HF, "train()", "train(resume_from_checkpoint=True)",
         f"line 5: `resume_from_checkpoint` {LEAVE} a job resumes from its own checkpoints"),
        (HF, "train()", "train(resume_from_checkpoint=args.resume)", ""),
        (PL, "max_epochs=3,", "max_epochs=3, limit_train_batches=0.1,",
         f"line 3: `limit_train_batches` {LEAVE} an epoch has every sample once"),
        (PL, "val_check_interval=1.0", "val_check_interval=0.25",
         f"line 3: `val_check_interval` {LEAVE} the number of steps in an epoch changes with the batch"),
        (PL, "val_check_interval=1.0", "val_check_interval=50, fast_dev_run=False", ""),
        (PL, "loader)", 'loader, ckpt_path="last")',
         f"line 4: `ckpt_path` {LEAVE} a job resumes from its own checkpoints"),
        (PL, "trainer =", "module.automatic_optimization = False\ntrainer =",
         "line 3: manual optimization is refused: write the loop with ScalingAgent"),
        (text_of("accelerator"), "    accelerator.print", "    accelerator.save_state()\n    print",
         f"line 21: `save_state()` {LEAVE} a job resumes from its own checkpoints"),
    ],
)  # fmt: skip
def test_options_and_calls_that_an_adapter_refuses_are_named(
    script: str, before: str, after: str, line: str
) -> None:
    assert ported(script.replace(before, after)).refused == [line] * bool(line)


def test_a_trainer_of_lightning_gets_a_strategy_and_other_forms_are_named() -> None:
    bare = PL.replace("max_epochs=3, val_check_interval=1.0", "")
    former = PL.replace("import lightning as L", "import pytorch_lightning as L")

    assert "L.Trainer(strategy=ElasticStrategy(), devices=1, max_epochs=3," in ported(PL).text
    assert "L.Trainer(strategy=ElasticStrategy(), devices=1)" in ported(bare).text
    assert ported(former).missing == [
        "line 3: pytorch_lightning has no adapter: import lightning.pytorch instead"
    ]
    endless = text_of("accelerator").replace("for epoch in range(1, 5):", "while True:")
    assert ported(endless).missing == [
        "no `for epoch in range(...)` around `backward()`: write `for epoch in accelerator.epochs(N)`"
    ]


@pytest.mark.parametrize(
    ("name", "change", "first"),
    [
        ("plain", "SGD(", ""),
        ("plain", "LBFGS(", "first make the changes above, "),
        ("gan", "SGD(", "first make the changes above, "),
    ],
)
def test_a_job_that_would_fail_is_not_said_to_be_ready(
    tmp_path: Path, name: str, change: str, first: str
) -> None:
    (tmp_path / "script.py").write_text(text_of(name).replace("SGD(", change))

    said = ones("init", str(tmp_path / "script.py")).out

    assert said.splitlines()[-1] == f"{first}then: ones submit {tmp_path}/job.toml"


def test_parameter_groups_keep_the_lines_of_model_and_optimizer() -> None:
    lines = SMALL.strip().splitlines()
    groups = 'optimizer = SGD([{"params": model.a.parameters(), "lr": 1.0}], lr=0.1)'
    lines[1:4] = [lines[3], "steps = len(loader)", "model = Net()", "model = DDP(model)", groups]

    assert ported("\n".join(lines)).text.splitlines()[1:7] == [
        "from elastic import ScalingAgent",
        "agent = ScalingAgent.from_env()",
        "model = Net()",
        groups,
        "model, optimizer, loader = agent.load(lambda: model, lambda _: optimizer, data, batch_size=8)",
        "steps = len(loader)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["groups", "no_trainer"])
def test_a_script_with_groups_runs_as_ported(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ported(text_of(name)).text)

    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("example", ["digits", "embedding", "language"])
def test_the_plain_examples_are_ported_in_fewer_than_six_lines(example: str) -> None:
    text = (Path(__file__).parents[4] / "examples" / example / "plain.py").read_text()

    diff = ported(text).diff(text, "plain.py")

    load = (
        "+    model, optimizer, loader = agent.load(build_model, build_optimizer, data, batch_size="
    )
    assert any(line.startswith(load) for line in diff.splitlines())
    assert changed_lines(diff) <= 5


@pytest.mark.parametrize(
    ("loop", "epochs"),
    [
        ("range(EPOCHS)", "agent.epochs(EPOCHS)"),
        ("range(0, EPOCHS)", "agent.epochs(EPOCHS)"),
        ("range(1, EPOCHS + 1)", "(1 + n for n in agent.epochs(EPOCHS))"),
        ("range(1, 1 + EPOCHS)", "(1 + n for n in agent.epochs(EPOCHS))"),
        ("range(1, 11)", "(1 + n for n in agent.epochs(10))"),
        ("range(2, EPOCHS + 1)", "(2 + n for n in agent.epochs(EPOCHS + 1 - 2))"),
        ("range(resumed, EPOCHS)", "agent.epochs(EPOCHS)"),  # the agent knows where it goes on
        ("trange(3)", "agent.epochs(3)"),
        ("tqdm(range(3), leave=False)", "tqdm(agent.epochs(3), leave=False)"),
    ],
)
def test_epochs_are_counted_as_the_script_counts_them(loop: str, epochs: str) -> None:
    text = ported(SMALL.replace("range(5)", loop)).text

    assert f"for epoch in {epochs}:" in text.splitlines()


def test_the_job_file_of_a_script_can_be_submitted(tmp_path: Path) -> None:
    script = tmp_path / "arguments.py"
    script.write_text(text_of("arguments"))
    (tmp_path / "job.toml").write_text(
        job_file(facts_of(text_of("arguments")), script, "arguments.py")
    )

    assert load_job(tmp_path / "job.toml") == JobSpec(
        name="arguments", script="arguments.py", workdir=str(tmp_path), batch_size=32, lr=1.0,
        slots=(1, 4), stop=StopRule(epochs=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "hints"),
    [
        ("", "", []),  # it has a metric
        ("val_loss", "result", ["# the training loss is reported; `agent.report(accuracy=...)` adds a metric"]),
    ],
)  # fmt: skip
def test_the_job_file_says_how_a_metric_is_reported_if_the_script_has_none(
    before: str, after: str, hints: list[str]
) -> None:
    text = job_file(facts_of(SMALL.replace(before, after)), Path("/a/train.py"), "train.py")

    assert [line for line in text.splitlines() if "training loss" in line] == hints


def test_a_script_whose_loss_is_a_variable_reports_no_loss_of_its_own() -> None:
    named = SMALL.replace(
        "loss(model(batch)).backward()",
        "train_loss = loss(model(batch))\n        train_loss.backward()",
    )

    assert "report" not in ported(named.replace("val_loss", "result")).text


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/digits.py", "digits"), ("/a/my digits/train.py", "my-digits"), ("/train.py", "job"),
     ("/a/_x y.py", "x-y")],
)  # fmt: skip
def test_a_job_is_named_after_the_script_or_its_folder(path: str, name: str) -> None:
    assert job_name(Path(path)) == name


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(text_of("plain"))
    return path


def test_init_writes_a_job_file_and_changes_the_script_with_apply(script: Path) -> None:
    file = script.parent / "job.toml"

    first, again = ones("init", str(script)), ones("init", str(script))
    applied = ones("init", str(script), "--apply", "-o", "json")

    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(
        f"wrote {file} (batch_size 16, lr 0.05, epochs 3)\nto change: 6 lines of {script}\n"
    )
    assert first.out.endswith(
        f"`ones init {script} --apply` makes these changes\nthen: ones submit {file}\n"
    )
    hint = "--force replaces it, --to FILE writes another"
    assert (again.code, again.out) == (2, "")
    assert again.err == f"ones: {file} exists already; {hint}\n"
    assert applied.json["applied"] is True
    assert script.read_text() == ported(text_of("plain")).text
    assert sorted(path.name for path in script.parent.iterdir()) == ["job.toml", "plain.py"]


@pytest.mark.parametrize("options", [["--force"], ["--force", "--apply"]])
def test_the_job_file_of_a_ported_script_is_not_replaced(script: Path, options: list[str]) -> None:
    file = script.parent / "job.toml"
    ones("init", str(script), "--apply")
    before = file.read_text()

    said = ones("init", str(script), *options)

    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"ones: {script} already uses the library, so its numbers cannot be read; "
        f"edit {file}, or write another with --to FILE\n"
    )
    assert file.read_text() == before


def test_a_script_without_known_parts_gets_a_job_file(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(text_of("endless"))

    said = json.loads(ones("init", str(script), "--apply", "-o", "json").out)

    assert (said["applied"], said["diff"], len(said["missing"])) == (False, "", 2)
    assert script.read_text() == text_of("endless")
    assert load_job(tmp_path / "job.toml").batch_size == 32


@pytest.mark.parametrize(
    ("text", "why"),
    [("x = (", "is not valid Python: '(' was never closed"), (None, "No such file")],
)
def test_a_script_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)

    said = ones("init", str(tmp_path / "train.py"))

    assert (said.code, said.out) == (2, "")
    assert why in said.err


def test_a_ported_script_keeps_its_numbers_and_the_name_of_its_agent() -> None:
    before = facts_of(text_of("plain"))
    after = facts_of(port(before).text)
    own_rate = facts_of(
        "from elastic import ScalingAgent\n"
        "ours = ScalingAgent.from_env(seed=3)\n"
        "make = lambda parameters: torch.optim.SGD(parameters, lr=0.5)\n"
        "model, optimizer, loader = ours.load(Net, make, data, batch_size=8, lr=0.25)\n"
        "for epoch in ours.epochs(3):\n    pass\n"
    )

    found = [(one.batch_size, one.lr, one.epochs, one.agent) for one in (before, after, own_rate)]
    assert found == [(16, 0.05, 3, "agent"), (16, 0.05, 3, "agent"), (8, 0.25, 3, "ours")]


def test_two_loaders_that_are_read_side_by_side_are_named() -> None:
    text = (
        "a = DataLoader(one, batch_size=8)\n"
        "b = DataLoader(other, batch_size=8)\n"
        "for epoch in range(3):\n"
        "    for x, y in tqdm(zip(a, b)):\n"
        "        loss(model(x), y).backward()\n"
    )

    assert ported(text).refused == [f"line 4: {SIDE_BY_SIDE}"]


def test_a_default_before_the_slash_is_a_constant() -> None:
    text = SMALL.replace("model = Net()", "def run(rate=0.5, /, size=4):\n    pass\nmodel = Net()")

    assert facts_of(text.replace("lr=0.1", "lr=rate").replace("=8", "=size")).lr == 0.5


# The lines before the loss, the loss, and whether it is a sum over the batch.
# `each` has one value for each sample, `total` is a sum, `other` is unknown.
LOSSES = [
    ("", 'F.cross_entropy(out, y, reduction="sum")', True),
    ("", "F.cross_entropy(out, y)", False),
    ("", 'F.cross_entropy(out, y, reduction="mean")', False),
    ("", 'F.cross_entropy(out, y, reduction="sum").float()', True),
    ("", 'nn.MSELoss(reduction="sum")(out, y)', True),
    ('criterion = nn.MSELoss(reduction="sum")', "criterion(out, y)", True),
    ('criterion = nn.MSELoss(reduction="sum")', "criterion(out, y) / len(y)", False),
    ('criterion = nn.MSELoss(reduction="none")', "criterion(out, y).sum()", True),
    ('criterion = partial(F.mse_loss, reduction="sum")', "criterion(out, y)", True),
    ('criterion = lambda a, b: F.mse_loss(a, b, reduction="sum")', "criterion(out, y)", True),
    ('if flag:\n    f = nn.MSELoss()\nelse:\n    f = nn.MSELoss(reduction="sum")', "f(out, y)", False),
    ("import F\nclass A:\n    def mse_loss(self):\n        return 0", 'F.mse_loss(a, y, reduction="sum")', True),
    ('kind = "sum"', "F.mse_loss(out, y, reduction=kind)", True),
    ("", "F.mse_loss(out, y, reduction=args.kind)", False),
    ("", "each.sum()", True),
    ("", "torch.sum(each)", True),
    ("", "each.sum() / len(x)", False),
    ("", "each.sum().div(len(x))", False),
    ("", "each.sum().div(2)", True),
    ("", "each.mean()", False),
    ("", "each.sum(1).mean()", False),
    ("", "each.sum(dim=(1, 2)).mean(0)", False),
    ("", "torch.sum(each, dim=1).mean()", False),
    ("", "each.sum(dim=1).sum()", True),
    ("", "each.sum(0)", True),
    ("", "(each * mask).sum()", False),
    ("", "(0.5 * each).sum()", True),
    ("", "other.sum()", False),
    ("", "other.sum() * 0.5", False),
    ("", "each.mean() + each.sum() * 0.5", True),
    ("", "each.mean() + 1e-4 * sum(p.abs().sum() for p in net.parameters())", False),
    ("", "0.5 * total", True),
    ("", "-total / 2", True),
    ("", "weight * total", False),
    ("", "total / accumulation_steps", False),
    ("", "(total + other) / x.size(0)", False),
    ("", "scaler.scale(total)", True),
    ("", "sum([total, other])", True),
    ("", "sum(F.mse_loss(a, b, reduction='sum') for a, b in heads)", True),
    ("", "total if flag else total + other", True),
    ("", "total if flag else other", False),
    ("loss = total\nloss /= len(x)", "loss", False),
    ("loss = total\nloss /= 8", "loss", True),
    ("loss = total\nloss = loss / len(x)", "loss", False),
    ("loss = other\nloss += total", "loss", True),
    ("loss = 0\nfor head in heads:\n    loss += F.mse_loss(head, y, reduction='sum')", "loss", True),
    ("loss = total\nif flag:\n    loss = loss / len(x)", "loss", False),
    ("loss = total\nif flag:\n    loss = loss + other", "loss", True),
    ("for head in heads:\n    loss = loss + other", "loss", False),
    ("for loss in [other]:\n    loss = loss + total", "loss", True),
    ("loss = total\nfor loss in parts:\n    pass", "loss", False),
    ("for n in rounds:\n    (loss / 1).backward()\n    loss = total", "other", True),
    ("", "(new := total)", True),
    ("", "each.sum(axis=1)", False),
    ("loss, more = total, other", "loss", True),
    ("losses = {'all': total, 'part': other}", "losses['part']", False),
    ("losses = {'all': total, 'part': other}", "losses['all']", True),
    ("def f(a):\n    return g(a)\ndef g(b):\n    return b + other", "f(total)", True),
    ("def f(a):\n    return g(a)\ndef g(b):\n    return b / len(x)", "f(total)", False),
    ("def f(a, b):\n    return a + b, a, b", "f(total, other)[0]", True),
    ("def f(a, how='sum'):\n    return F.mse_loss(a, y, reduction=how)", "f(out)", True),
    ("def f(a):\n    return f(a)", "f(total)", False),
    ("class L(nn.Module):\n    def forward(self, a):\n        return a.sum()\nl = L()", "l(each)", True),
]  # fmt: skip
KNOWN = """
each = F.mse_loss(out, y, reduction="none")
total = F.mse_loss(out, y, reduction="sum")
"""
VAE = """
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD

def train(epoch):
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
"""
TRAINER = """
class Trainer:
    def __init__(self, model, criterion):
        self.criterion = criterion

    def loss(self, x, y):
        return self.criterion(self.model(x), y)

    def step(self, x, y):
        loss = self.loss(x, y)
        loss.backward()

def main():
    trainer = Trainer(Net(), nn.MSELoss(reduction="sum"))
"""
LIGHTNING = """
class Model(LightningModule):
    def training_step(self, batch):
        loss = F.mse_loss(self(batch), batch, reduction="sum")
        return {"log": 1, "loss": loss}
"""
TRANSFORMERS = """
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        loss = F.mse_loss(outputs, inputs["y"], reduction="sum")
        return (loss, outputs) if return_outputs else loss
"""


@pytest.mark.parametrize(("before", "loss", "is_sum"), LOSSES)
def test_a_loss_is_a_sum_only_if_nothing_divides_it(
    before: str, loss: str, *, is_sum: bool
) -> None:
    tree = ast.parse(f"{KNOWN}\n{before}\n({loss}).backward()\n")

    assert bool([*summed_losses(tree)]) is is_sum


@pytest.mark.parametrize(
    ("script", "line"),
    [(VAE, 3), (TRAINER, 14), (LIGHTNING, 4), (TRANSFORMERS, 5)],
    ids=["vae", "trainer", "lightning", "transformers"],
)
def test_the_line_that_sums_is_found_through_functions_methods_and_parameters(
    script: str, line: int
) -> None:
    assert [*summed_losses(ast.parse(script))] == [line]

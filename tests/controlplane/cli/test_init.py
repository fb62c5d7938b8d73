"""ones init: what it finds in scripts of many forms, what it changes in them, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.cli.init_script.job_template import job_file, job_name
from controlplane.cli.init_script.port_script import changed_lines, port
from controlplane.cli.init_script.script_facts import look
from controlplane.cli.init_script.syntax import Source
from controlplane.client.jobfile import load_job
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


def source(name: str) -> Source:
    return Source((SCRIPTS / f"{name}.py").read_text())


@pytest.mark.parametrize("name", ADDED)
def test_a_script_is_ported_with_these_lines(name: str) -> None:
    script = source(name)

    diff = port(look(script)).diff(script.text, f"{name}.py")

    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and line[1:2] != "+"]
    assert added == ADDED[name]
    assert changed_lines(diff) == len(added)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("plain", (16, 0.05, 3)),
        ("arguments", (32, 1.0, 4)),
        ("distributed", (16, 0.003, 2)),
        ("schedule", (12, 0.1, 3)),
        ("finetune", (20, 0.01, 2)),
        ("own_agent", (8, 0.01, 2)),
        ("groups", (8, 0.01, 2)),
        ("no_trainer", (8, 5e-5, 3)),
        ("endless", (None, 0.1, None)),
    ],
)
def test_batch_rate_and_epochs_are_read_from_constants_defaults_and_options(
    name: str, numbers: tuple[int | None, float | None, int | None]
) -> None:
    facts = look(source(name))

    assert (facts.batch_size, facts.lr, facts.epochs) == numbers


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "endless",
            [
                "no `NAME = DataLoader(...)` that is trained on: agent.load() makes it",
                "no `for epoch in range(...)` around `backward()`: write `for epoch in agent.epochs(N)`",
            ],
        ),
        (
            "torchrun",
            [
                "line 33: `for epoch in range(max_epochs):` trains in other functions: give them what agent.load() returns, and loop over agent.epochs(N) there",
                "line 16: `DDP(...)` in another place: leave it out: the agent's group reduces gradients",
            ],
        ),
        (
            "gan",
            [
                "line 14: a second optimizer, `optimizerG` beside `optimizerD`: build_model returns all models as one nn.ModuleDict, build_optimizer a tuple: docs/exactness.md has such a loop",
            ],
        ),
    ],
)
def test_what_cannot_be_ported_is_said_line_by_line(name: str, lines: list[str]) -> None:
    ported = port(look(source(name)))

    assert (ported.text, ported.missing) == ("", lines)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("model = Net()", "from elastic import ScalingAgent\nmodel = Net()", "it imports the library already"),
        ("model = Net()", "def make():\n    global model\n    model = Net()\nmake()", "`model` is made in another place"),
        ("batch_size=8)", "batch_sampler=mine)", "a batch sampler"),
        ("batch_size=8)", "batch_size=8, sampler=Weighted(data))", "a sampler of its own"),
        ("lr=0.1)", "lr=0.1 / len(loader))\n", ""),
        ("model = Net()", "model = Net(); model.double()", "give each statement a line of its own"),
        ("model.parameters()", "[model.bias, *model.parameters()]", ""),
        ("batch_size=8)", "batch_size=8)\nmodel = DDP(model)", ""),
        ("loader = Data", "print(optimizer.state)\nloader = Data", ""),
        ("for epoch in range(5)", "dist.init_process_group()\nfor epoch in range(5)", ""),
        ("    val_loss", "    dist.all_reduce(x)\n    val_loss", ""),
    ],
)  # fmt: skip
def test_a_form_that_needs_thought_is_named_and_others_are_ported(
    before: str, after: str, why: str
) -> None:
    ported = port(look(Source(SMALL.replace(before, after))))

    assert (bool(ported.text), why in " ".join(ported.missing)) == (not why, True)


def test_what_needs_a_process_group_of_torchs_own_is_named() -> None:
    text = SMALL.replace("for epoch in", "dist.init_process_group()\nfor epoch in").replace(
        "    val_loss", "    dist.all_reduce(x)\n    val_loss"
    )

    ported = port(look(Source(text)))

    assert ported.text == ""
    assert ported.missing == [
        "line 10: dist.all_reduce(): there is no process group of torch's own; agent.report() takes rank 0's numbers for all"
    ]


def test_a_loader_that_the_optimizer_needs_cannot_be_made_by_load() -> None:
    lines = SMALL.strip().splitlines()
    lines[1:4] = [lines[3], lines[1], "rate = 1 / len(loader)", lines[2].replace("0.1", "rate")]

    assert port(look(Source("\n".join(lines)))).missing == [
        "line 5: it needs rate, which is there only when agent.load() has returned"
    ]


def test_a_metric_is_reported_where_six_lines_allow_it() -> None:
    assert (
        port(look(Source(SMALL))).text
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
    seventh = port(look(Source(SMALL.replace("Net()", "Net(1)"))))
    assert "agent.report" not in seventh.text
    assert seventh.advice == [
        "`agent.report(val_loss=val_loss)` at the end of each epoch makes it a metric of the job"
    ]


def test_a_script_with_functions_that_build_has_them_called() -> None:
    text = SMALL.replace("SGD(model.parameters(), lr=0.1)", "make_adam(model.parameters())")
    own = f"def build_optimizer(parameters):\n    return 0\n{SMALL}"

    assert "agent.load(Net, make_adam, data, batch_size=8)" in port(look(Source(text))).text
    assert (
        "\nmake_optimizer = lambda parameters: SGD(parameters, lr=0.1)\n"
        in port(look(Source(own))).text
    )


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("    val_loss", "    torch.save(model, path)\n    val_loss",
         "line 9: every worker does torch.save(): ask `agent.rank == 0` first"),
        ("    val_loss", "    if rank == 0:\n        torch.save(model, path)\n    val_loss", ""),
        ("    val_loss", "        if n % 4 == 0:\n            optimizer.step()\n    val_loss",
         "line 9: not each batch is a step: let `max_local_batch` divide it"),
        ("    val_loss", "        if n > 9:\n            break\n    val_loss",
         "line 9: the batch loop is left early: all workers have to, at once"),
        ("    val_loss", "    if patience:\n        break\n    val_loss", ""),
    ],
)  # fmt: skip
def test_what_a_group_would_do_otherwise_is_named(before: str, after: str, line: str) -> None:
    advice = port(look(Source(SMALL.replace(before, after)))).advice

    assert [said for said in advice if said.startswith("line")] == [line] * bool(line)


def test_groups_by_parts_keep_the_lines_that_make_them_but_for_wrappers() -> None:
    lines = SMALL.strip().splitlines()
    groups = 'optimizer = SGD([{"params": model.a.parameters(), "lr": 1.0}], lr=0.1)'
    lines[1:4] = [lines[3], "steps = len(loader)", "model = Net()", "model = DDP(model)", groups]

    assert port(look(Source("\n".join(lines)))).text.splitlines()[1:7] == [
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
    (tmp_path / "train.py").write_text(port(look(source(name))).text)

    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("example", ["digits", "embedding", "language"])
def test_the_plain_examples_are_ported_in_fewer_than_six_lines(example: str) -> None:
    script = Source((Path(__file__).parents[3] / "examples" / example / "plain.py").read_text())

    diff = port(look(script)).diff(script.text, "plain.py")

    load = (
        "    model, optimizer, loader = agent.load(build_model, build_optimizer, data, batch_size="
    )
    assert [line for line in diff.splitlines() if line.startswith(f"+{load}")] != []
    assert changed_lines(diff) <= 5


@pytest.mark.parametrize(
    ("loop", "ported"),
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
def test_epochs_are_counted_as_the_script_counts_them(loop: str, ported: str) -> None:
    text = port(look(Source(SMALL.replace("range(5)", loop)))).text

    assert f"for epoch in {ported}:" in text.splitlines()


def test_the_job_file_of_a_script_can_be_submitted(tmp_path: Path) -> None:
    script = tmp_path / "arguments.py"
    script.write_text(source("arguments").text)
    (tmp_path / "job.toml").write_text(job_file(look(source("arguments")), script, "arguments.py"))

    assert load_job(tmp_path / "job.toml") == JobSpec(
        name="arguments",
        script="arguments.py",
        workdir=str(tmp_path),
        batch_size=32,
        lr=1.0,
        slots=(1, 4),
        stop=StopRule(epochs=4),
        retries=1,
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/digits.py", "digits"), ("/a/my digits/train.py", "my-digits"), ("/train.py", "job"),
     ("/a/_x y.py", "x-y")],
)  # fmt: skip
def test_jobs_are_called_like_the_script_or_its_folder(path: str, name: str) -> None:
    assert job_name(Path(path)) == name


def test_init_writes_a_job_file_and_leaves_the_script_until_it_is_told(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(source("plain").text)

    first = ones("init", str(script))
    again = ones("init", str(script))
    applied = ones("init", str(script), "--apply", "-o", "json")

    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(
        f"wrote {tmp_path}/job.toml (batch_size 16, lr 0.05, epochs 3)\nto change: 6 lines of {script}\n"
    )
    assert first.out.endswith(
        f"`ones init {script} --apply` makes these changes\nthen: ones submit {tmp_path}/job.toml\n"
    )
    assert (again.code, again.out) == (2, "")
    assert again.err == (
        f"ones: {tmp_path}/job.toml is there already; --force replaces it, --to FILE writes another\n"
    )
    assert applied.json["applied"] is True
    assert script.read_text() == port(look(source("plain"))).text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "plain.py"]


def test_a_script_of_which_nothing_is_known_has_a_job_file_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(source("endless").text)

    said = json.loads(ones("init", str(script), "--apply", "-o", "json").out)

    assert (said["applied"], said["diff"], len(said["missing"])) == (False, "", 2)
    assert script.read_text() == source("endless").text
    assert load_job(tmp_path / "job.toml").batch_size == 32


@pytest.mark.parametrize(
    ("text", "why"), [("x = (", "is no Python: '(' was never closed"), (None, "No such file")]
)
def test_a_script_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)

    said = ones("init", str(tmp_path / "train.py"))

    assert (said.code, said.out) == (2, "")
    assert why in said.err

"""The policy of docs/policies/own.md, exactly as printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from tests.support.cluster import TOY, running
from tests.support.commands import ones
from tests.support.documented import ROOT
from tests.support.simulations import NodeGroup

PAGE = (ROOT / "docs" / "policies" / "own.md").read_text(encoding="utf-8")
SMALL = ("--gpus", "4", "--jobs", "5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the file."""
    (printed,) = re.findall(r"^```python\n(\"\"\"las.py.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert printed.count("\n") <= 40
    (tmp_path / "las.py").write_text(printed)
    return tmp_path


def test_the_class_runs_in_the_simulator_as_in_a_notebook(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell: dict[str, type] = {}
    exec((folder / "las.py").read_text(), cell)  # noqa: S102 - as a notebook does
    scenario = Scenario(jobs=12, nodes=(NodeGroup(count=2, slots=4),), node_loss_s=500.0)

    result = simulate(cell["Las"], scenario, seed=1, options={"quantum_s": 600.0})

    monkeypatch.syspath_prepend(folder)
    named = simulate("las:Las", scenario, seed=1, options={"quantum_s": 600.0})
    assert (result.policy, result.options) == ("Las", {"quantum_s": 600.0})
    assert {job.state for job in result.jobs} == {"succeeded"}
    assert (named.policy, named.jobs) == ("las:Las", result.jobs)


@pytest.mark.slow
def test_the_commands_find_the_file_in_the_current_folder(folder: Path) -> None:
    one = ("run", "--policy", "las:Las", "--option", "quantum_s=600", *SMALL)
    several = ("compare", "--policies", "fifo,las:Las", "--seeds", "0-1", "--ours", "las:Las")
    options = ("--option", "las:Las.quantum_s=600", "--results", "kept.jsonl", *SMALL)

    run = ones("sim", *one, "-o", "json", cwd=folder)
    compared = ones("sim", *several, *options, "-o", "json", cwd=folder)

    assert (run.code, run.json["policy"]) == (0, "las:Las")
    assert (compared.code, [each["policy"] for each in compared.json["results"]]) == (
        0, ["fifo", "las:Las"] * 2,
    )  # fmt: skip
    text = (folder / "las.py").read_text()
    (folder / "las.py").write_text(text.replace("job.served(now)", "job.submitted_at"))
    ones("sim", *several, *options, cwd=folder)
    kept = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    assert [each["policy"] for each in kept].count("fifo") == 2
    assert [each["policy"] for each in kept].count("las:Las") == 4, "an edited file is another one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("las:Los", "has no 'Los'; choose one of Las"),
        ("lass:Las", "No module named 'lass'"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(folder: Path, wrong: str, told: str) -> None:
    for command in (
        ("sim", "run", "--policy", wrong),
        ("sim", "compare", "--policies", f"fifo,{wrong}"),
        ("local", "up", "--dir", str(folder / "home"), "--policy", wrong),
    ):
        done = ones(*command, cwd=folder, PYTHONPATH=str(folder))
        assert (done.code, "Traceback" in done.err) == (2, False)
        assert told in done.err
    assert not (folder / "home").exists()


@pytest.mark.slow
def test_what_a_policy_does_to_its_process_ends_the_simulation_only(tmp_path: Path) -> None:
    text = "from tests.support.outside_policies import EndsItsProcess, Prints\n"
    (tmp_path / "mine.py").write_text(text)
    run = ("sim", "run", *SMALL, "-o", "json", "--policy")

    ended = ones(*run, "mine:EndsItsProcess", cwd=tmp_path, PYTHONPATH=str(ROOT))
    printed = ones(*run, "mine:Prints", cwd=tmp_path, PYTHONPATH=str(ROOT))

    assert ended.code == 2
    assert "policy mine:EndsItsProcess ended its process" in ended.err
    assert "s of virtual time" in ended.err
    assert printed.json["policy"] == "mine:Prints"
    assert "printed by a policy" in printed.err


@pytest.mark.slow
def test_the_file_schedules_a_live_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slots, for three jobs of which one waits."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    options = "options = { quantum_s = 5.0 }"
    with running(folder, options, policy="las:Las", slots=2) as cluster:
        jobs = [cluster.submit(TOY, env={"PAUSE_S": "0.05"}, slots=[1, 1]) for _ in range(3)]
        codes = [cluster.wait(job).code for job in jobs]
        policy = cluster.ones("top", "--once", "-o", "json").out

    assert codes == [0, 0, 0]
    assert "las:Las" in policy


@pytest.mark.slow
def test_jobs_train_while_the_policy_of_a_live_cluster_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from tests.support.outside_policies import UnknownJob\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with running(tmp_path, policy="mine:UnknownJob", slots=2) as cluster:
        jobs = [cluster.submit(TOY, slots=[1, 1]) for _ in range(3)]
        codes = [cluster.wait(job).code for job in jobs]
        log = (cluster.home / "logs" / "controller.log").read_text()

    assert codes == [0, 0, 0]
    assert "policy mine:UnknownJob: `plan` is impossible: job z-9 is not in the view" in log
    assert "Traceback" not in log

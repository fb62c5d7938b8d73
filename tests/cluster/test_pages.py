"""The pages of `docs/` do what they say: their commands and scripts run in the order of the page."""

from __future__ import annotations

import getpass
import inspect
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.client import BlockingClient, Client
from tests.support.cluster import LIMIT_S, TOY, Cluster, looked

DOCS = Path(__file__).parents[2] / "docs"
SLOW = TOY.replace('os.environ.get("PAUSE_S", "0")', '"0.01"')
SAVING = SLOW.replace("mse=loss.item()", "mse=loss.item(), over=os.path.exists('GO')") + (
    'agent.rank or torch.save(model.state_dict(), "model.pt")\n'
)
CHOOSES = TOY.replace("lr=0.05)", "lr=0.05, sampler=range(400))")
JOB = """
name = "{name}"
script = "train.py"
workdir = "{name}"
batch_size = 20
max_batch_size = {most}
slots = {slots}
stop = {{ metric = "over", at_least = 1.0, consecutive = 1 }}

[env]
OMP_NUM_THREADS = "1"
"""
UNSETTLED = {"queued", "starting", "rescaling"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def await_free_slots(cluster: Cluster) -> None:
    with BlockingClient(cluster.home, timeout=LIMIT_S) as client:
        looked(lambda: sum(node.free for node in client.nodes()) == cluster.slots, why=client.nodes)


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the pages' readers have: the folders of their jobs, and a cluster."""
    for name, script in (
        ("toy", SAVING.replace("GO", str(tmp_path / "go"))),
        ("wide", TOY),
        ("small", TOY),
        ("sampler", CHOOSES),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
        most, slots = (10 if name == "small" else 40), ([4, 4] if name == "wide" else [1, 4])
        text = JOB.format(name=name, most=most, slots=slots)
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONES_HOME", str(cluster.home))
    monkeypatch.setenv("COLUMNS", "160")
    await_free_slots(cluster)  # jobs that other tests cancelled may still be leaving
    yield tmp_path
    cluster.clear()


@pytest.mark.slow
def test_the_pages_of_the_client_run_and_have_every_method(folder: Path) -> None:
    pages = ("client.md", "client/operate.md")
    code = "\n".join(block for page in pages for block in blocks(page, "python"))
    (folder / "toy" / "train.py").write_text(SLOW)
    exec(compile(code, "client.md", "exec"), {"__name__": "client.md"})  # noqa: S102

    text = "".join((DOCS / page).read_text() for page in pages)
    methods = {
        name
        for kind in (BlockingClient, Client)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert {
        name for name in methods if f"`{name}`" not in text and f".{name}(" not in text
    } == set()


@dataclass
class Reader:
    """Types what a page shows, and compares what comes with what is shown there.

    Names of jobs have other numbers here, and other numbers and times differ anyway.
    """

    cluster: Cluster
    folder: Path
    names: dict[str, str] = field(default_factory=dict)  # here, by name on the page

    def follows(self, page: str) -> int:
        """Type all commands of `page`; how many they were."""
        typed = 0
        for block in blocks(page, "console"):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                self.types(command, shown.splitlines())
                typed += 1
        return typed

    def types(self, command: str, shown: list[str]) -> None:
        here = command
        for name, mine in self.names.items():
            here = re.sub(rf"\b{name}\b", mine, here)
        if command.startswith("ones wait"):
            (self.folder / "go").touch()
        said = self.answer(here)
        if command.startswith("ones submit") and not said.startswith("ones:"):
            self.names[shown[0]] = said.split()[0]
        for mine in self.names.values():
            self.settle(mine)
        lines = [masked(line) for line in said.splitlines()]
        missing = [line for line in shown if not any(looks_like(line)(found) for found in lines)]
        assert missing == [], f"$ {here}\n{said}"

    def answer(self, command: str) -> str:
        words = shlex.split(os.path.expandvars(command))
        if words[0] == "ones":
            paths = {word: str(self.folder / word) for word in words if word.endswith(".toml")}
            done = self.cluster.ones(*(paths.get(word, word) for word in words[1:]))
            return done.out + done.err
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def settle(self, job: str) -> None:
        """Wait until it trains as ordered, with an epoch behind it, or waits, or has ended."""

        def settled(shown: dict[str, Any]) -> bool:
            waits = shown["state"] == "queued" and "waits" in shown["reason"]
            last = shown["epochs"][-1]["global_batch"] if shown["epochs"] else 0
            return (
                waits
                or (shown["state"] not in UNSETTLED and last == shown["global_batch"])
                or (shown["state"] in {"succeeded", "failed", "cancelled"})
            )

        self.cluster.until(job, settled)


def masked(line: str) -> str:
    """Numbers and the reader's name as on the page."""
    plain = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "root", line)
    return " ".join(re.sub(r"\d+", "0", plain).split())


def looks_like(shown: str) -> Callable[[str], Any]:
    """Whether a masked line is one as the page shows it, with anything for `...`."""
    wanted = ".*".join(re.escape(masked(part)) for part in shown.split("..."))
    return re.compile(wanted.replace(r"\ ", " ") + "$").search


@pytest.mark.slow
def test_the_answers_of_the_questions_page_match_the_commands(
    cluster: Cluster, folder: Path
) -> None:
    assert Reader(cluster, folder).follows("questions.md") == 21

"""Parts of `bin/gpu-day` on the simulated device, and the judgement of their results."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.gpu_day import NO_GPU, environment, judge, visible_gpus
from tests.support.simgpu.processes import MODES, on_ranks, ranks_of
from tests.training.gpu.gpu_parts import PARTS, Answer, Member
from tests.training.peers import HERE, RendezvousInfo

pytestmark = pytest.mark.slow  # a cluster or devices of its own


def part_on_device(_: Any, meeting: RendezvousInfo, name: str) -> Answer:
    importlib.import_module("tests.support.simgpu.worker")
    member = Member(meeting.rank, meeting.size, meeting.store, HERE, version=1, elements=5000)
    return PARTS[name].play(member)


def played(name: str, size: int, mode: str) -> str:
    answers = on_ranks(part_on_device, size, name, NCCL_DOUBLE=mode)
    return judge(PARTS[name], size, {rank: (0, one, "") for rank, one in enumerate(answers)})


def test_the_device_meets_the_librarys_assumptions() -> None:
    assert played("device", 1, "ordinary") == ""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bits", "bandwidth", "beside"])
def test_a_part_of_two_ranks_passes(name: str, mode: str) -> None:
    assert played(name, 2, mode) == ""


@pytest.mark.parametrize("mode", MODES)
def test_survivors_of_a_death_form_a_group(mode: str) -> None:
    with ranks_of(part_on_device, 3, "death", NCCL_DOUBLE=mode) as made:
        answers = [made.said(rank) for rank in (0, 1)]
        made.processes[2].join(5)
        code = made.processes[2].exitcode

    ended = {0: (0, answers[0], ""), 1: (0, answers[1], ""), 2: (code or 0, None, "")}
    assert judge(PARTS["death"], 3, ended) == ""
    assert [answer["sum"] for answer in answers] == [2.0, 2.0]


# --- what is judged

EQUAL: Answer = {"digests": ["a"], "largest error": 0.0}


@pytest.mark.parametrize(("answers", "wrong"), [
    ([EQUAL, EQUAL], ""),
    ([EQUAL, {**EQUAL, "digests": ["b"]}], "ranks have different bits"),
    ([{**EQUAL, "largest error": 0.1}, EQUAL], "the sums are no sums"),
    ([EQUAL, None], "a rank gave no answer"),
])  # fmt: skip
def test_different_bits_are_judged_wrong(answers: list[Answer | None], wrong: str) -> None:
    ended = {rank: (0, answer, "") for rank, answer in enumerate(answers)}

    assert judge(PARTS["bits"], 2, ended) == wrong


@pytest.mark.parametrize(("codes", "answer", "wrong"), [
    ([0, 0, -9], {}, ""),
    ([0, -6, -9], {}, "exit codes [0, -6, -9], not [0, 0, -9]"),
    ([0, 0, -9], {"sum": 3.0}, "the new group does not sum"),
    (
        [0, 0, -9],
        {"ended by": "the sum of a group with a dead member"},
        "a broken all-reduce gave the sum of a group with a dead member",
    ),
])  # fmt: skip
def test_an_ended_or_deceived_survivor_is_judged_wrong(
    codes: list[int], answer: Answer, wrong: str
) -> None:
    living = {"sum": 2.0, "ended by": "BrokenGroupError", **answer}
    answers = [living, living, None]
    ended = {
        rank: (code, said, "") for rank, (code, said) in enumerate(zip(codes, answers, strict=True))
    }

    assert codes[2] == -signal.SIGKILL
    assert judge(PARTS["death"], 3, ended) == wrong


def test_ranks_on_one_gpu_look_like_different_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert visible_gpus(1) == ["MIG-a", "MIG-b"]

    own, shared = (environment(1, "MIG-b", HERE, shared) for shared in (False, True))

    assert (own["CUDA_VISIBLE_DEVICES"], own.get("NCCL_HOSTID")) == ("MIG-b", None)
    assert shared["NCCL_HOSTID"] == "rank-1"


def test_the_command_exits_with_its_own_code_without_a_gpu() -> None:
    code = "import sys, torch; torch.cuda.is_available = lambda: False\nfrom tests.support import gpu_day; sys.argv = ['gpu-day']; sys.exit(gpu_day.main())"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (NO_GPU, "no GPU: nothing was looked at\n")

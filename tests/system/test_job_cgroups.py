"""Groups of jobs: in which trees, with which limits, and what ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import cgroups
from nodeagent.accounts import check_jobs
from nodeagent.cgroups import CPU, MEMORY, MOUNTS, PIDS, Hierarchy, find, members
from nodeagent.job_cgroups import JobGroups, group_of_job
from nodeagent.settings import AgentSettings, Controller, Jobs
from schemas.errors import SettingsError
from schemas.ids import WorkerId
from schemas.jobs import Shape
from tests.support.builders import A, B

W0, W1, OTHER = WorkerId(f"{A}.v1.r0"), WorkerId(f"{A}.v1.r1"), WorkerId(f"{B}.v1.r0")
needs_groups = pytest.mark.skipif(not find(), reason="needs control groups that it may divide")
needs_memory = pytest.mark.skipif(
    MEMORY not in {name for tree in find() for name in tree.controllers}, reason="no memory"
)
MIB, GIB = 1 << 20, 1 << 30
SLEEPS = "echo; exec sleep 60"
ESCAPES = "setsid sh -c 'sleep 60 & echo; wait' & wait"


def made(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    (path / "cgroup.procs").touch()
    for name, text in files.items():
        (path / name.replace("_", ".", 1)).write_text(text)
    return path


ONE = "cgroup {at}/memory cgroup rw,memory 0 0\ncgroup {at}/pids cgroup rw,pids 0 0\n"
TWO = "cgroup2 {at}/unified cgroup2 rw 0 0\n"


ALL, NONE = frozenset({MEMORY, PIDS}), frozenset[str]()
OWN = "8:pids:/\n4:memory:/box\n1:name=systemd:/x\n0::/\n"
TREES_OF = {
    "version 2, which limits something": (
        TWO, "0::/a.service\n", {"unified/a.service": "cpu memory pids\n"},
        [("unified/a.service", ALL | {CPU}, True)],
    ),
    "version 1, where version 2 limits nothing": (
        ONE + TWO, OWN, {"unified": "hugetlb\n", "memory/box": "", "pids": ""},
        [("memory/box", {MEMORY}, False), ("pids", {PIDS}, False)],
    ),
    "version 2 to end processes": (TWO, "0::/\n", {"unified": ""}, [("unified", NONE, True)]),
    "no mount": ("", "0::/\n", {}, []),
    "not there": (TWO, "0::/elsewhere\n", {"unified": ""}, []),
    "outside of what is shown": (TWO, "0::/../other\n", {"unified": ""}, []),
    "version 1 without a group": (ONE, "0::/\n", {"unified": ""}, []),
}  # fmt: skip


@pytest.mark.parametrize(("mounts", "own", "groups", "expected"), TREES_OF.values(), ids=TREES_OF)
def test_the_groups_of_a_host_are_found(
    tmp_path: Path,
    mounts: str,
    own: str,
    groups: dict[str, str],
    expected: list[tuple[str, set[str], bool]],
) -> None:
    for group, controllers in groups.items():
        made(tmp_path / group, cgroup_controllers=controllers)
    (tmp_path / "mounts").write_text(mounts.format(at=tmp_path))
    (tmp_path / "own").write_text(own)

    assert find(mounts=tmp_path / "mounts", own=tmp_path / "own") == tuple(
        Hierarchy(tmp_path / group, frozenset(names), unified=unified)
        for group, names, unified in expected
    )


class Fake(JobGroups):
    """Version 2 in a folder of plain files: a new group has the kernel's."""

    def __init__(self, base: Path, limits: Jobs) -> None:
        made(base, cgroup_subtree_control="", cgroup_controllers="cpu memory pids")
        self.base = base
        tree = Hierarchy(base, frozenset({CPU, MEMORY, PIDS}), unified=True)
        super().__init__((tree,), base, limits)
        made(base / self.name, cgroup_subtree_control="")

    def _make_leaf(self, group: str, name: str) -> None:
        top = self.base / self.name / group
        if not top.exists():
            made(
                top, cpu_max="", memory_max="", memory_swap="", pids_max="",
                memory_events="oom_kill 0\n",
            )  # fmt: skip
            (top / "memory.swap").rename(top / "memory.swap.max")
        if not (top / name).exists():
            made(top / name)

    def said(self, *names: str) -> list[str]:
        return [(self.base / self.name / group_of_job(A) / name).read_text() for name in names]


def test_limits_are_those_of_the_slots_that_a_job_has_here(tmp_path: Path) -> None:
    groups = Fake(tmp_path / "g", Jobs(memory_bytes=GIB, pids=100))
    files = ("memory.max", "memory.swap.max", "pids.max")

    groups.hold(W0, A)
    one = groups.said(*files)
    groups.hold(W1, A)
    two = groups.said(*files)
    groups.use(Jobs(memory_bytes=2 * GIB))

    assert one == [str(GIB), "0", "100"]
    assert two == [str(2 * GIB), "0", "200"]
    assert groups.said(*files) == [str(4 * GIB), "0", "max"]


def test_cores_and_memory_of_a_job_file_are_limits_for_each_slot(tmp_path: Path) -> None:
    groups = Fake(tmp_path / "g", Jobs(memory_bytes=GIB))
    files = ("cpu.max", "memory.max")
    stated = Shape("", (), 1.5, 4 * GIB)

    groups.hold(W0, A, stated)
    one = groups.said(*files)
    groups.hold(W1, A, stated)
    two = groups.said(*files)
    groups.release(W1)

    assert one == ["150000 100000", str(4 * GIB)]
    assert two == ["300000 100000", str(8 * GIB)]
    assert groups.said(*files) == one
    assert (tmp_path / "g" / "cgroup.subtree_control").read_text() == "+cpu +memory"


def test_a_worker_is_told_the_limit_when_processes_were_killed_for_memory_since_its_start(
    tmp_path: Path,
) -> None:
    groups = Fake(tmp_path / "g", Jobs(memory_bytes=GIB))
    for worker, job in ((W0, A), (W1, A), (OTHER, B)):
        groups.hold(worker, job)
    events = tmp_path / "g" / groups.name / group_of_job(A) / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 1\noom_group_kill 0\n")

    assert [groups.release(worker) for worker in (OTHER, W1, W0)] == [None, 2 * GIB, None]


TREES = [
    pytest.param(find(), id="as agents use them"),
    pytest.param(
        tuple(
            Hierarchy(Path(mount), frozenset(), unified=True)
            for _, mount, kind, *_ in map(str.split, MOUNTS.read_text().splitlines())
            if kind == "cgroup2" and os.access(mount, os.W_OK)
        ),
        id="with cgroup.kill",
    ),
]


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def born_in(groups: JobGroups, worker: WorkerId, code: str) -> subprocess.Popen[bytes]:
    """A process that is in the group of a worker before it does anything."""
    told = ["sh", "-c", f"read _; {code}"]
    process = subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    groups.enter(worker, process.pid)
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"\n"
    return process


def leaves(groups: JobGroups) -> dict[str, int]:
    """How many processes are in each group of a worker, in one tree."""
    top = groups._tops[0][1]
    return {leaf.name: len(members(leaf)) for leaf in top.glob("*/*") if leaf.is_dir()}


@pytest.mark.slow
@needs_groups
@pytest.mark.parametrize("trees", TREES)
def test_all_processes_of_a_worker_end_with_it_and_others_go_on(
    trees: tuple[Hierarchy, ...], tmp_path: Path, running: list[subprocess.Popen[bytes]]
) -> None:
    groups = JobGroups(trees, tmp_path)
    for worker, job in ((W0, A), (W1, A), (OTHER, B)):
        groups.hold(worker, job)
        running.append(born_in(groups, worker, ESCAPES if worker == W0 else SLEEPS))
    assert leaves(groups)[W0] == 3

    groups.release(W0)

    assert running[0].wait(30.0) == -signal.SIGKILL
    assert leaves(groups) == {W1: 1, OTHER: 1}
    assert [process.poll() for process in running[1:]] == [None, None]
    groups.release(W1)
    groups.release(OTHER)
    groups.close()
    assert not any(top.exists() for _, top in groups._tops)


@pytest.mark.slow
@needs_groups
def test_an_agent_adopts_living_workers_and_ends_the_processes_of_ended_ones(
    tmp_path: Path, running: list[subprocess.Popen[bytes]]
) -> None:
    former = JobGroups(find(), tmp_path)
    for worker, job in ((W0, A), (OTHER, B)):
        former.hold(worker, job)
        running.append(born_in(former, worker, SLEEPS))
    groups = JobGroups(find(), tmp_path)

    groups.open()
    groups.adopt(W0, A, running[0].pid)
    running.append(subprocess.Popen(["sleep", "60"]))  # of an agent without groups
    groups.adopt(W1, A, running[2].pid)
    groups.end_left()

    assert leaves(groups) == {W0: 1, W1: 1}
    assert running[1].wait(30.0) == -signal.SIGKILL
    assert running[0].poll() is None
    groups.end_everything()
    assert running[0].wait(30.0) == -signal.SIGKILL


def test_a_group_of_version_2_is_divided_again_when_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, int]] = []

    def note(_: Hierarchy, group: Path, most: int) -> None:
        bound.append((group.parent.stat().st_mode & 0o777, most))

    monkeypatch.setattr(cgroups, "divide", lambda group, _: group.chmod(0o711))
    monkeypatch.setattr(cgroups, "bound_memory", note)
    tree = Hierarchy(tmp_path, frozenset({MEMORY}), unified=True)
    groups = JobGroups((tree,), tmp_path / "run", Jobs(memory_bytes=MIB))
    groups.open()  # which removes what is empty

    groups.hold(W0, A)

    assert bound == [(0o711, MIB)]


@pytest.mark.slow
@needs_memory
def test_memory_beyond_the_limit_is_counted_for_its_worker(
    tmp_path: Path, running: list[subprocess.Popen[bytes]]
) -> None:
    groups = JobGroups(find(), tmp_path, Jobs(memory_bytes=64 << 20))
    groups.open()
    for worker, job in ((W0, A), (OTHER, B)):
        groups.hold(worker, job)
        running.append(born_in(groups, worker, f"echo; {GREEDY if worker == W0 else SLEEPS}"))

    running[0].wait(60.0)

    assert [groups.release(worker) for worker in (OTHER, W0)] == [None, 64 << 20]
    groups.close()


@needs_memory
def test_a_new_agent_keeps_the_limits_of_an_empty_group_of_another(tmp_path: Path) -> None:
    limits = Jobs(memory_bytes=64 << 20)
    groups, other = (JobGroups(find(), tmp_path / name, limits) for name in ("one", "other"))
    groups.open()
    other.open()

    groups.hold(W0, A)

    bounds = [
        (top / group_of_job(A) / file).read_text()
        for tree, top in groups._tops
        for file in [f"memory.{'max' if tree.unified else 'limit_in_bytes'}"]
        if MEMORY in tree.controllers
    ]
    assert bounds == [f"{64 << 20}\n"]
    groups.release(W0)
    groups.close()
    other.close()


GREEDY = "head -c 1G /dev/zero | tail > /dev/null"


@pytest.mark.parametrize(("jobs", "field", "why"), [
    ({"memory_bytes": 1000}, "jobs.memory_bytes", "too low for any worker"),
    ({"memory_bytes": GIB}, "jobs.memory_bytes", "below /no/where that limit memory"),
    ({"pids": 100}, "jobs.pids", "that limit processes, and jobs run as the agent"),
])  # fmt: skip
def test_limits_that_cannot_be_applied_are_refused_at_the_start(
    jobs: dict[str, int], field: str, why: str
) -> None:
    given = Jobs(run_as="agent", trust_each_other=True, cgroup="/no/where", **jobs)  # type: ignore[arg-type]

    with pytest.raises(SettingsError, match=why) as refused:
        check_jobs(AgentSettings(node="n1", controller=Controller(host="10.0.0.1"), jobs=given))

    assert refused.value.field == field
    assert refused.value.hint

"""ones submit, fetch and export without a cluster: uploads, dry runs, failing workers and texts."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.cli.job_output import _as_fetched, _say_fetched, _say_list
from controlplane.cli.output import Common
from controlplane.cli.submission import (
    Submission,
    library_note,
    prepare,
    snapshot_line,
    start_text,
)
from controlplane.cli.submit import failing_rank, jobs_continue_notice
from controlplane.client.archive import PackedFile, survey
from controlplane.client.files import Fetch, Fetched, JobFiles
from controlplane.client.formats import byte_count
from controlplane.client.interpreters import NoTorchError, convert_state
from schemas.errors import BadFieldError
from schemas.ids import JobId, Seconds
from schemas.wire.client import ExpectedStart
from schemas.wire.feed import FeedEvent
from tests.support.builders import job_spec
from tests.support.commands import ones
from tests.support.file_trees import PROJECT, tree

JOB = 'name = "digits"\nscript = "train.py"\nbatch_size = 64\nargs = ["--width", "64"]\n'


def job_folder(folder: Path, job: str = JOB) -> Path:
    return tree(folder, {"job.toml": job, "train.py": "elastic;", "data.bin": b"0" * 2000})


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345, "12 kB"), (999_600, "1.0 MB"),
     (3_400_000, "3.4 MB"), (2 * 10**9, "2.0 GB")],
)  # fmt: skip
def test_bytes_are_shown_in_units_of_1000(size: int, text: str) -> None:
    assert byte_count(size) == text


def test_a_snapshot_is_described_by_size_number_and_largest_files(tmp_path: Path) -> None:
    spec = job_spec(workdir="/w")
    files = (PackedFile("a", 10), PackedFile("b", 4000), PackedFile("c", 7), PackedFile("d", 20))

    assert snapshot_line(Submission(tmp_path, spec, files)) == (
        "4.0 kB in 4 files of /w (largest: b 4.0 kB, d 20 B, a 10 B)"
    )
    assert snapshot_line(Submission(tmp_path, spec, files[:1])) == "10 B in 1 file of /w (a 10 B)"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train.py": "import lib", "lib.py": "x = 1", "other.py": "import elastic"},
         'train.py does not use elastic.ScalingAgent, and would fail on several slots: `ones init train.py` shows what to change; unchanged it runs as kind = "torchrun" or "command"'),
        ({"train.py": "from elastic import ScalingAgent"}, ""),
        ({"train.py": "import lib", "lib/__init__.py": "from . import a", "lib/a.py": "elastic"}, ""),
    ],
)  # fmt: skip
def test_a_script_that_does_not_use_the_library_is_named(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    folder = tree(tmp_path, {"job.toml": JOB, **files})

    assert library_note(prepare(folder / "job.toml", ())) == said


def test_the_survey_lists_the_files_of_the_archive(tmp_path: Path) -> None:
    folder = tree(tmp_path, {**PROJECT, ".git/x": "1", "large/data": "22", ".onesignore": "large"})

    found = survey(folder)

    assert {file.path: file.size for file in found} == {
        ".onesignore": 5, **{name: len(text) for name, text in PROJECT.items()}
    }  # fmt: skip


NOON = datetime(2026, 12, 1, 12, 0).astimezone().timestamp()
LATER = ExpectedStart(
    starts="later", at=Seconds(NOON), earliest=Seconds(NOON - 600.0), latest=Seconds(NOON + 3600.0),
    ahead=2, after="bert-9", after_ends_at=Seconds(NOON - 60.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (ExpectedStart(starts="now", at=Seconds(NOON)), "now"),
        (LATER, "about 12:00 (80%: 11:50 to 13:00); behind 2 jobs; bert-9 is expected to end at 11:59"),
        (replace(LATER, latest=None, ahead=0, after=None), "about 12:00 (80%: 11:50 to an unknown time)"),
        (ExpectedStart(ahead=1, reason="why"), "unknown; behind 1 job; why"),
    ],
)  # fmt: skip
def test_a_predicted_start_is_said_with_what_it_rests_on(start: ExpectedStart, text: str) -> None:
    assert start_text(start, NOON - 3600.0) == text


def test_a_start_is_predicted_by_a_dry_run_only(tmp_path: Path) -> None:
    command = ("submit", str(job_folder(tmp_path) / "job.toml"), "--when")

    assert ones(*command).code == 2
    assert ones(*command, "--dry-run", "-o", "json").json["start"] is None  # no cluster


def test_a_dry_run_shows_the_job(tmp_path: Path) -> None:
    utility = "utility = { value = 5, deadline_s = 60, decay = 0.1 }\n"
    job_folder(tmp_path, JOB + utility)
    command, size = ("submit", str(tmp_path / "job.toml"), "--dry-run"), len(JOB + utility)
    changes = ("lr=0.1", "args.width=8", "env.A=b", "utility.value=7")

    said = ones(*command, *(word for change in changes for word in ("--set", change)))
    row = ones(*command, "-o", "json").json

    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        f"{tmp_path}/job.toml can be submitted",
        "  name            digits",
        "  script          train.py",
        "  batch_size      64",
        "  args            --width 8",
        f"  workdir         {tmp_path}",
        "  lr              0.1",
        "  slots           1",
        "  utility         value=7.0, deadline_s=60.0, decay=0.1",
        "  env             A=b",
        f"  snapshot        2.1 kB in 3 files of {tmp_path} (largest: data.bin 2.0 kB, job.toml {size} B, train.py 8 B)",
    ]
    assert (row["job"], row["state"], row["spec"]["args"]) == (None, "valid", ["--width", "64"])
    sizes = {"data.bin": 2000, "job.toml": size, "train.py": 8}
    largest = [{"path": name, "bytes": count} for name, count in sizes.items()]
    assert row["snapshot"] == {"bytes": 2008 + size, "files": 3, "largest": largest}


def test_a_shell_command_is_submitted_without_a_file(tmp_path: Path) -> None:
    line = ("submit", "--wrap", "sort words | uniq -c", "--set", "slots=2", "--dry-run")

    said = ones(*line, cwd=tmp_path)
    both = ones(*line, "job.toml", cwd=tmp_path)
    neither = ones("submit", "--dry-run", cwd=tmp_path)

    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "command can be submitted",
        "  name            sort",
        "  kind            command",
        "  command         /bin/sh -c 'sort words | uniq -c'",
        f"  workdir         {tmp_path}",
        "  slots           2",
        f"  snapshot        0 B in 0 files of {tmp_path}",
    ]
    remedy = "give one of: FILE, --wrap 'COMMAND'"
    assert (both.code, both.err) == (2, f"ones: FILE and --wrap are both given; {remedy}\n")
    assert (neither.code, neither.err) == (2, f"ones: `ones submit` needs FILE; {remedy}\n")


def test_an_invalid_file_or_override_is_named_and_no_job_is_submitted(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    job_folder(good)
    job_folder(bad, JOB.replace("64\n", "0\n", 1))

    said = ones("submit", str(good / "job.toml"), str(bad / "job.toml"), "--home", str(tmp_path))

    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("ones: batch_size: is missing; ")

    override = ones("submit", str(good / "job.toml"), "--dry-run", "--set", "lr=fast")
    assert (override.code, override.out) == (2, "")
    assert "lr: Expected `float | null`, got `str`" in override.err


def exited(version: int, rank: int, code: int | None, signal: int | None = None) -> FeedEvent:
    detail: dict[str, str | int | float | bool | None] = {
        "rank": rank, "slot": f"n/{rank}", "version": version, "code": code, "signal": signal
    }  # fmt: skip
    return FeedEvent(
        seq=1, time=Seconds(0.0), event="worker.exited", job=JobId("a-1"), node=None, detail=detail
    )


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([exited(1, 0, 0), exited(1, 1, 3)], 1),
        ([exited(1, 1, 1), exited(1, 0, None, 15)], 1),  # the others are ended for it
        ([exited(1, 0, None, 15), exited(1, 1, 1)], 1),
        ([exited(1, 1, None, 11), exited(1, 0, 1)], 1),
        ([exited(1, 1, 1), exited(2, 0, 1)], 0),  # of the last try
        ([exited(1, 1, 1), exited(2, 0, None, 9)], None),
        ([exited(1, 0, None, None)], None),
        ([], None),
    ],
)
def test_the_failing_worker_is_the_first_to_end_by_itself_in_the_last_group(
    ends: list[FeedEvent], rank: int | None
) -> None:
    assert failing_rank(ends) == rank


@pytest.mark.parametrize(
    ("jobs", "said"),
    [(["a-1"], "\nones: a-1 goes on; `ones cancel a-1` ends it\n"),
     (["a-1", "b-2"], "\nones: a-1, b-2 go on; `ones cancel JOB` ends it\n")],
)  # fmt: skip
def test_an_interrupted_wait_notes_that_its_jobs_continue(
    jobs: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), jobs_continue_notice(jobs):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == said


def interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter without torch."""
    return interpreter(
        tmp_path / "bare", 'echo "ModuleNotFoundError: No module named torch" >&2; exit 1'
    )


@pytest.mark.slow
def test_the_first_interpreter_that_has_torch_extracts_the_model(tmp_path: Path, bare: str) -> None:
    able = interpreter(tmp_path / "able", 'test "$*" = "-P -m elastic.export_state in out"')
    failing = interpreter(tmp_path / "failing", "echo first >&2; echo is damaged >&2; exit 1")

    convert_state(Path("in"), Path("out"), [str(tmp_path / "none"), bare, able])
    remedy = f"no torch in {bare}; name an interpreter .* with --python"
    with pytest.raises(NoTorchError, match=remedy):
        convert_state(tmp_path, tmp_path, [bare])
    with pytest.raises(BadFieldError, match="the checkpoint cannot be exported: is damaged"):
        convert_state(tmp_path, tmp_path, [failing, bare])


def test_fetched_and_missing_files_are_listed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("123")
    done = Fetch((_as_fetched(tmp_path / "a.txt"),), ("n1: link: leads out",), ("n2 is away",))

    _say_fetched("j-1", tmp_path, done, Common())
    text = capsys.readouterr()
    _say_fetched("j-1", tmp_path, done, Common(output="json"))
    document = capsys.readouterr()

    digest = hashlib.sha256(b"123").hexdigest()
    assert done.files == (Fetched(tmp_path / "a.txt", 3, digest),)
    assert text.out == f"     3 B  a.txt\n1 file, 3 B, in {tmp_path}\n"
    assert text.err == "ones: not fetched: n1: link: leads out\nones: not fetched: n2 is away\n"
    assert (json.loads(document.out), document.err) == (
        {
            "job": "j-1",
            "to": str(tmp_path),
            "files": [{"path": f"{tmp_path}/a.txt", "bytes": 3, "sha256": digest}],
            "refused": ["n1: link: leads out"],
            "missing": ["n2 is away"],
        },
        "",
    )


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*", "ones: j-1 created or changed no file, and has no checkpoint\n"),
        ("*.png", "ones: no file of j-1 matches '*.png'; `ones fetch j-1 --list` names them\n"),
    ],
)
def test_an_empty_result_is_explained(
    pattern: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_fetched("j-1", tmp_path, Fetch((), (), ()), Common(), pattern)
    _say_list("j-1", JobFiles((), (), ()), Common(), pattern)

    assert capsys.readouterr() == ("", said * 2)

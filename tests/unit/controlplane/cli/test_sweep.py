"""ones sweep without a cluster: drawings, files and refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console, RenderableType

from controlplane.cli.output import ABSENT_NOTE, Common
from controlplane.cli.sweep import tables
from controlplane.cli.sweep.commands import values_of
from controlplane.cli.sweep.export import draw, write_csv, write_scalars
from controlplane.cli.sweep.preview import replay_task
from controlplane.client import Choice, Integer, LogUniform
from controlplane.client.archive import digest_of, pack
from controlplane.client.sweeps.runs import manifest_of, write_manifest
from schemas.errors import BadFieldError, RemoteError, UnreachableError
from schemas.ids import JobId, Seconds, SlotId
from schemas.wire.client import SweepDetail
from tests.support.builders import A
from tests.support.client_examples import detail, ledger, summary, sweep, trial, unit
from tests.support.commands import ones

TRAINING = trial(
    1, 0.6, 0.7, state="training", granted=3, partition=2, slot=SlotId("n1/0"), partitions_left=3
)
WHOLE = detail(
    trial(0, 0.5, state="stopped", reason="not among the best 1 of 2 after 1 epoch"),
    TRAINING,
    trial(2, 0.9, parent=1, start_epochs=2, state="done", granted=3),
    units_done=18, units_left=6, units_repeated=1, unit_s=2.0, moved_bytes=12_000_000, waited_s=1.0,
    trained_s=99.0,
)  # fmt: skip


def shown(drawn: RenderableType, width: int = 150) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_dashboard_shows_the_best_trial_the_units_and_training_trials_first() -> None:
    assert shown(tables.dashboard(WHOLE, 150, now=0.0)) == [
        "a-1  running  asha, 3 trials (1 stopped, 1 training, 1 done), 4 partitions, 2 slots",
        "trains on 2 slots",
        "best: trial 2, accuracy 0.9 after 3 epochs (lr 0.03, width 16)",
        "units: 18 done, 6 left, 1 repeated, 2 s each, about 6.0s left",
        "━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸              75%  12 MB hopped, 1.0% of the time",
        " trial    lr  width  state        epoch  partition  slot  accuracy  best    curve  reason",
        "─" * 122,
        "     1  0.02     16  training  2/3 +1/4          2  n1/0  0.7       0.7 @2  ▂▄",
        "2 of 1  0.03     16  done           3/3                   0.9       0.9 @3  █",
        "     0  0.01     16  stopped        1/1                   0.5       0.5 @1  ▁      not among the best 1 of 2 after 1 epoch",
    ]


def test_a_narrow_dashboard_omits_columns_and_counts_other_trials() -> None:
    many = detail(*(trial(number, 0.5) for number in range(30)))

    lines = shown(tables.dashboard(many, 60, now=0.0, most=4), width=60)

    assert all(len(line) <= 60 for line in lines)
    assert lines[-1].split() == ["and", "27", "more"]


def test_control_characters_of_a_script_are_escaped() -> None:
    values: dict[str, Any] = {"lr": 1.0, "width": "\x07"}
    loud = trial(0, state="failed", reason="\x1b[31mred\nand\tmore", values=values)

    lines = shown(tables.dashboard(detail(loud), 120, now=0.0))

    assert all(line.isprintable() for line in lines)
    assert lines[-1].endswith("\\x1b[31mred and more")


def test_the_time_left_comes_from_the_controller_or_from_units_and_slots() -> None:
    quiet = msgspec.structs.replace(WHOLE, unit_s=None)
    expected = msgspec.structs.replace(WHOLE, expected_end=Seconds(110.0))

    assert tables.time_left(WHOLE, 100.0) == 6 * 2.0 / 2
    assert tables.time_left(expected, 100.0) == 10.0
    assert tables.time_left(quiet, 100.0) is None
    assert tables.time_left(msgspec.structs.replace(WHOLE, units_left=0), 100.0) is None


class DamagedClient:
    """A controller with a sweep, an ordinary job, and a job whose row is damaged."""

    def jobs(self, *, ended: bool) -> list[Any]:
        assert ended
        return [summary(JobId(name)) for name in ("a-1", "b-2", "c-3")]

    def sweep(self, job: str) -> SweepDetail:
        if job == "b-2":
            raise BadFieldError("job: b-2 is no sweep", "`ones show` is for jobs", "job")
        if job == "a-1":
            raise RemoteError("journal", "the journal's ended job a-1: wrong checksum")
        return WHOLE


def test_a_sweep_that_cannot_be_read_is_named_and_the_others_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(tables._sweeps(cast("Any", DamagedClient()), ended=True)) == [WHOLE]
    assert capsys.readouterr().err == (
        "ones: omitting a-1: the journal's ended job a-1: wrong checksum\n"
    )


def test_a_sweep_without_trials_is_drawn_too() -> None:
    lines = shown(tables.dashboard(detail(summary=summary(A, reason="waits")), 100, now=0.0))

    assert lines[0] == "a-1  queued  asha, no trials yet, 4 partitions, 0 slots"
    assert tables.summary_lines(detail(), 0.0)[-1] == "units: 0 done, 0 left"


def test_top_tolerates_an_absent_controller_and_ends_with_the_sweep() -> None:
    over = msgspec.structs.replace(WHOLE, summary=summary(A, state="succeeded"))
    replies: list[SweepDetail | None] = [WHOLE, None, over]
    out, pauses = io.StringIO(), list[float]()

    def read() -> SweepDetail:
        if (reply := replies.pop(0)) is None:
            raise UnreachableError("the controller does not reply", "")
        return reply

    console = Console(file=out, force_terminal=True, width=150, height=40)
    tables.follow(read, console, pauses.append, lambda: 0.0)

    assert pauses == [1.0, 1.0]
    assert ABSENT_NOTE in out.getvalue()
    assert "succeeded" in out.getvalue()


def test_every_epoch_is_a_line_of_csv(tmp_path: Path) -> None:
    assert write_csv(WHOLE, tmp_path / "s.csv") == 4
    assert (tmp_path / "s.csv").read_text().splitlines()[:2] == [
        "trial,parent,config.lr,config.width,epoch,ended,accuracy,loss",
        "0,,0.01,16,1,100.0,0.5,0.5",
    ]
    with pytest.raises(BadFieldError, match="No such file or directory; choose another file"):
        write_csv(WHOLE, tmp_path / "none" / "s.csv")


def test_every_scalar_is_written_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415

    assert write_scalars(WHOLE, tmp_path) == 8

    found = []
    for file in sorted(tmp_path.glob("trial-1/events.*")):
        for record in records(file.read_bytes()):
            event = Event.FromString(record)
            found += [(one.tag, event.step, round(one.simple_value, 6))
                      for one in event.summary.value if one.HasField("simple_value")]  # fmt: skip
    assert sorted(found) == [
        ("accuracy", 1, 0.6), ("accuracy", 2, 0.7), ("loss", 1, 0.4), ("loss", 2, 0.3)
    ]  # fmt: skip


def records(data: bytes) -> list[bytes]:
    """Records of a TFRecord file: length (8 bytes), its checksum (4), data, its checksum (4)."""
    found = []
    while data:
        length = int.from_bytes(data[:8], "little")
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_curves_are_drawn_into_a_file(tmp_path: Path) -> None:
    draw(WHOLE, tmp_path / "c.png", "accuracy")
    draw(WHOLE, tmp_path / "t.png", "loss", over_time=True)

    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "t.png").stat().st_size > 5000
    with pytest.raises(BadFieldError, match="no trial of a-1 has reported 'acc'; one of accuracy"):
        draw(WHOLE, tmp_path / "c.png", "acc")
    with pytest.raises(BadFieldError, match="has reported 'loss'; wait for the first epoch"):
        draw(detail(trial(0)), tmp_path / "c.png", "loss")


def test_a_single_trial_is_shown_with_all_its_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    tables._show_trial(WHOLE, 2, Common())

    out = capsys.readouterr().out
    assert out.startswith(
        "trial 2 of a-1: done\n  lr 0.03, width 16\n  continues from trial 1 after 2"
    )
    assert out.splitlines()[-1].split() == ["3", "0.1", "0.9"]
    with pytest.raises(BadFieldError, match="a-1 has no trial 3; 0 to 2"):
        tables._show_trial(WHOLE, 3, Common())


SPACE = {
    "lr": LogUniform(1e-4, 1e-1), "depth": Integer(1, 4), "bits": Choice("8", "16"),
    "width": Choice(16, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "value"),
    [("lr=1", 1.0), ("lr=1e-2", 0.01), ("depth=2", 2), ("bits=8", "8"), ("width=64", 64),
     ("width=48", 48)],
)  # fmt: skip
def test_assigned_values_have_the_type_of_their_space(assignment: str, value: object) -> None:
    (found,) = values_of([assignment], SPACE).values()

    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("lr", "--set 'lr' is not an assignment; write NAME=VALUE"),
        ("withd=1", "--set withd: the space has no such value; did you mean width?"),
        ("lr=[1]", "--set lr: '\\[1\\]' is not a value of a configuration"),
    ],
)
def test_invalid_values_are_refused(assignment: str, said: str) -> None:
    with pytest.raises(BadFieldError, match=said):
        values_of([assignment], SPACE)


FILE = """
name = "s"
[sweep]
input_fn = "train:load"
model_fn = "train:build"
train_fn = "train:train"
metric = "loss"
mode = "min"
partitions = 4
space = { lr = { log_uniform = [1e-4, 1e-1] }, width = { choice = [16, 64], when = { lr = [1] } } }
searcher = { type = "successive_halving", max_epochs = 4, configurations = 6 }
"""
TRAIN = "def load(): ...\ndef build(): ...\ndef train(): ...\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "sweep.toml").write_text(FILE)
    return tmp_path


def test_a_preview_states_the_cost_of_a_sweep(folder: Path) -> None:
    file = str(folder / "sweep.toml")

    said = ones("sweep", "preview", file, "--unit-s", "90", "--state-mb", "20",
                "--set", "slots=[1, 8]")  # fmt: skip

    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "s: successive_halving, min of loss",
        "  lr              log_uniform 0.0001 to 0.1",
        "  width           16 | 64 when lr = 1",
        "  configurations  6",
        "  epochs          11 in all, at most 4 each",
        "  units           44 over 4 partitions, 54% less than all to the end",
        "  a unit          90 s",
        "  on 1 slot       about 1h06m",
        "  on 2 slots      about 33m00s",
        "  on 4 slots      about 24m00s, 69% of the slots' time trains",
        "  on 8 slots      about 24m00s, 34% of the slots' time trains",
        "  hops            20 MB a state, at most 760 MB in all",
        "  note            no more than 6 slots can be busy at once",
    ]
    assert ones("sweep", "preview", file, "--no-measure", "-o", "json").json["units"]["mean"] == 44


def test_a_sweep_is_submitted_by_either_command(folder: Path) -> None:
    file = str(folder / "sweep.toml")

    dry = ones("sweep", "submit", file, "--dry-run")

    assert dry.out == ones("submit", file, "--dry-run").out
    assert "  searcher        successive_halving configurations=6, min_epochs=1, eta=3" in dry.out
    assert "  space.width     16 | 64 when lr = 1" in dry.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("submit", "give either FILE or --manifest"),
        ("submit sweep.toml --manifest m.json", "give either FILE or --manifest"),
        ("submit sweep.toml --changed", "--workdir and --changed require --manifest"),
        ("submit --manifest m.json --changed", "--changed requires --workdir"),
        ("submit --manifest m.json --set a=1", "--set requires FILE"),
        ("submit --manifest none.json", "none.json: No such file"),
        ("submit job.toml", "j is not a sweep; give it a table [sweep]"),
        ("preview sweep.toml --unit-s 0", "--unit-s 0 is out of range"),
        ("export s-1", "nothing to export; give --csv FILE, --model FILE or --tensorboard DIR"),
        ("export s-1 --csv x --trial 3", "--trial requires --model"),
        ("replay m.json --trial 9", "no trial 9; 0 to 0"),
    ],
)
def test_invalid_options_are_refused_before_any_request(
    folder: Path, words: str, said: str
) -> None:
    job = 'name = "j"\nscript = "train.py"\nbatch_size = 1\n'
    (folder / "job.toml").write_text(job)
    spec = sweep(workdir=str(folder)).job_spec()
    write_manifest(manifest_of(spec, detail(trial(0, 0.5)), ledger([])), folder / "m.json")

    done = ones("sweep", *words.split(), "--home", str(folder), cwd=folder)

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"ones: {said}")
    assert done.err.count("\n") == 1


def test_a_manifest_is_submitted_again_only_with_equal_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "def evaluate(): ...\n")
    spec = sweep(workdir=str(tmp_path)).job_spec()
    found = manifest_of(spec, detail(trial(0, 0.5)), ledger([unit(0, 1)]))
    digest = digest_of(pack(tmp_path))
    file = tmp_path.parent / f"{tmp_path.name}.json"
    write_manifest(msgspec.structs.replace(found, snapshot=digest), file)

    again = ("sweep", "submit", "--manifest", str(file), "--dry-run")
    there = ("--workdir", str(tmp_path))

    stored, same = ones(*again), ones(*again, *there)
    (tmp_path / "train.py").write_text(TRAIN + "def evaluate(): return 1\n")
    other, accepted = ones(*again, *there), ones(*again, *there, "--changed")

    assert (stored.code, same.code, other.code, accepted.code) == (0, 0, 2, 0)
    assert f"  snapshot        {digest[:12]}, stored in the cluster by an earlier job" in stored.out
    assert "differs from the snapshot of a-1: " in other.err
    assert replay_task(found, 0)["visits"] == [
        {"config": "0", "values": {"lr": 0.01, "width": 16}, "epoch": 1, "partition": 0,
         "version": 1, "digest": "0-1"}
    ]  # fmt: skip

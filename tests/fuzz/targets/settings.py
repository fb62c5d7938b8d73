"""Files that people write: jobs, sweeps, settings, keys. A file is taken, or an error names it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.client.connection import find_home
from controlplane.client.job_file import load_job
from controlplane.policy.registry import check_options
from controlplane.service import settings as controller_settings
from controlplane.service.settings import ControllerSettings
from nodeagent import settings as agent_settings
from nodeagent.settings import AgentSettings
from schemas.codec import REQUEST, encode
from schemas.errors import OnesError, SettingsError
from schemas.host.reload import SettingsReload
from schemas.host.settings import find_problems, read_toml, valid_part
from schemas.jobs import MAX_SPEC_BYTES, problems
from schemas.transport.keys import load_authorised, load_keys, load_public
from schemas.wire.client import CheckJob
from tests.fuzz.choices import Choices
from tests.fuzz.targets.folders import folder, without_log_lines

JOB: Final[dict[str, Any]] = {
    "name": "a", "script": "train.py", "batch_size": 32, "args": ["--lr", "1"], "workdir": ".",
    "max_batch_size": 64, "max_local_batch": 32, "lr": 0.1, "slots": [1, 2], "family": "f",
    "slots_wanted": 1, "python": "python3", "record_samples": False, "priority": 1.0, "retries": 1,
    "on_loss": "fail", "progress_deadline_s": 600, "seed": 1, "env": {"A": "b"}, "stop": {"epochs": 2, "metric": "m", "at_least": 0.5},
    "utility": {"value": 1.0, "deadline_s": 2.0, "decay": 0.1},
}  # fmt: skip
SWEEP: Final[dict[str, Any]] = {
    "name": "a", "slots": [1, 4], "python": "python3",
    "sweep": {
        "input_fn": "data:load", "model_fn": "data:build", "train_fn": "data:train", "eval_fn": "data:test",
        "metric": "accuracy", "mode": "max", "partitions": 4, "replicas": 1, "seed": 3, "keep": 2,
        "order": "rollouts", "revoke_s": 3.0, "graduate_batch": 8,
        "space": {"lr": {"log_uniform": [1e-4, 0.1]}, "width": {"choice": [1, 2, "x"], "when": {"lr": [1]}}},
        "searcher": {"type": "asha", "configurations": 8, "max_epochs": 9, "eta": 3, "min_epochs": 1},
    },
}  # fmt: skip
SEARCHERS: Final = (
    "grid", "random", "successive_halving", "asha", "hyperband", "pbt", "median", "median_stopping",
    "population_based",
)  # fmt: skip
MODULE: Final = "def load(): ...\ndef build(): ...\ndef train(): ...\ndef test(): ...\n"
CONTROLLER: Final[dict[str, Any]] = msgspec.to_builtins(ControllerSettings())
AGENT: Final[dict[str, Any]] = msgspec.to_builtins(AgentSettings(node="n1"))
CLIENT: Final[dict[str, Any]] = {"endpoint": "tcp://127.0.0.1:7702", "server_key": "k", "key": "k"}
AUTHORISED: Final[dict[str, Any]] = {
    "key": [
        {"public": "a" * 40, "name": "ann", "role": "user", "project": "p", "expires": "2027-01-01T00:00:00Z"},
        {"public": "b" * 40, "name": "n1", "role": "node"},
    ]
}  # fmt: skip
POLICIES: Final = (
    "fifo", "ones", "ones_paper", "harmony", "slaq", "oasis", "drl", "srtf", "tiresias",
)  # fmt: skip


def toml(value: Any) -> str:
    """TOML of anything that has some."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if math.isnan(value):
            return "nan"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case bytes():
            return json.dumps(value.hex())
        case dict():
            inner = ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items())
            return "{" + inner + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
    return "1979-05-27T07:32:00Z"


def _file(choices: Choices, table: dict[str, Any], *, changes: int = 5) -> str:
    """A good file, some of whose values were exchanged; seldom anything else."""
    if choices.below(16) == 15:
        return choices.rest().decode("utf-8", "replace")
    table = json.loads(json.dumps(table))
    for _ in range(choices.below(changes)):
        _spoil(choices, table)
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in table.items())


def _spoil(choices: Choices, table: dict[str, Any]) -> None:
    inner: Any = table
    while True:
        steps = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not steps:
            return
        step = choices.pick(steps)
        if not isinstance(inner[step], dict | list) or not choices.often():
            break
        inner = inner[step]
    how = choices.below(6)
    if how == 0:
        del inner[step]
    elif how == 1 and isinstance(inner, dict):
        inner[choices.text()] = choices.value()
    elif how == 2:
        inner[step] = choices.value()
    else:
        same: dict[type, Callable[[], Any]] = {
            int: choices.whole, float: choices.real, str: choices.text, bool: choices.flag
        }  # fmt: skip
        inner[step] = same.get(type(inner[step]), choices.value)()


def _refused(load: Callable[[], Any]) -> Any:
    """What it gives; None: it was refused, in words."""
    try:
        return load()
    except OnesError as error:
        assert error.message
        str(error).encode()
        return None


def job_files(data: bytes) -> None:
    """A job that can be loaded can be sent, and is one that a controller takes."""
    choices = Choices(data)
    text = _file(choices, JOB)
    overrides = [
        f"{choices.pick((*JOB, 'stop.epochs', 'args.width', 'env.A', '', '.'))}={choices.text()}"
        for _ in range(choices.below(3))
    ]
    with folder() as here:
        (here / "train.py").write_text("")
        _loaded(here / "job.toml", text, overrides)


def sweep_files(data: bytes) -> None:
    """The same of sweeps."""
    choices = Choices(data)
    table = json.loads(json.dumps(SWEEP))
    if choices.flag():
        table["sweep"]["searcher"]["type"] = choices.pick(SEARCHERS)
    text = _file(choices, table)
    overrides = [
        f"{choices.pick(('space.lr', 'space.lr.choice', 'searcher.eta', 'partitions', 'name', 'x'))}={choices.text()}"
        for _ in range(choices.below(3))
    ]  # fmt: skip
    with folder() as here:
        (here / "data.py").write_text(MODULE)
        _loaded(here / "job.toml", text, overrides)


def _loaded(path: Path, text: str, overrides: list[str]) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    spec = _refused(lambda: load_job(path, overrides))
    if spec is None:
        return
    assert problems(spec) == ()
    sent = encode(CheckJob(spec=spec))
    assert len(sent) < 2 * MAX_SPEC_BYTES
    received = REQUEST.decode(sent)
    assert isinstance(received, CheckJob)
    assert problems(received.spec) == ()
    assert encode(received) == sent


def settings_files(data: bytes) -> None:
    """Settings of controller, agent and client, whole and read again while they are in use."""
    without_log_lines()
    choices = Choices(data)
    with folder() as here:
        path = here / "client.toml"
        kind, table, load = choices.pick(
            (
                (ControllerSettings, CONTROLLER, controller_settings.load),
                (AgentSettings, AGENT, agent_settings.load),
                (None, CLIENT, lambda path: find_home(path.parent)),
            )
        )
        path.write_bytes(_file(choices, table).encode("utf-8", "surrogatepass"))
        found = _refused(lambda: load(path))
        if kind is None:
            return
        with contextlib.suppress(SettingsError):
            read = read_toml(path)
            wrong = find_problems(kind, read, path)
            assert (found is None) == bool(wrong), wrong
            valid_part(read, wrong)
        if found is not None:
            fresh = msgspec.convert(table, kind)
            reload = SettingsReload(found, lambda: fresh, {})
            reload.reload()
            assert reload.current == found
        if isinstance(found, ControllerSettings):
            name = choices.pick(POLICIES)
            _refused(lambda: check_options(name, found.policy.options))


def key_files(data: bytes) -> None:
    """Lists of keys, and certificates."""
    choices = Choices(data)
    with folder() as here:
        path = here / "authorised.toml"
        path.write_bytes(_file(choices, AUTHORISED).encode("utf-8", "surrogatepass"))
        path.chmod(choices.pick((0o600, 0o600, 0o644)))
        _refused(lambda: load_authorised(path))
        path = here / "a.key_secret"
        path.write_bytes(_certificate(choices))
        path.chmod(0o600)
        _refused(lambda: load_keys(path))
        _refused(lambda: load_public(path))


def _certificate(choices: Choices) -> bytes:
    if not choices.often():
        return choices.rest()
    public = choices.pick(("a" * 40, "", "é", choices.text()))
    secret = choices.pick(("b" * 40, "", "é", choices.text()))
    lines = [
        "#   ****  Generated by pyzmq  ****", "metadata", choices.text(), "curve",
        f'    public-key = "{public}"', f'    secret-key = "{secret}"',
    ]  # fmt: skip
    return "\n".join(line for line in lines if choices.often()).encode("utf-8", "surrogatepass")

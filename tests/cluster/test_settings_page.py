"""The files of `ones config sample`, which docs/operations/settings.md shows: each setting is there."""

from __future__ import annotations

import re
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.cli.admin import SAMPLES, sample
from controlplane.client.connection import find_home
from controlplane.service import settings as controller
from nodeagent import settings as agent
from schemas.errors import SettingsError
from tests.support.documented import FENCE, ROOT

PAGES: Final = ROOT / "docs" / "operations"
FILES: Final = [(SAMPLES / f"{name}.toml").read_text("utf-8") for name in ("controller", "agent")]
CONTROLLER: Final = pytest.param(
    FILES[0], controller, controller.ControllerSettings(), id="controller.toml"
)
AGENT: Final = pytest.param(FILES[1], agent, agent.AgentSettings(node="node-1"), id="agent.toml")
ELSEWHERE: Final = {"sharing.users", "sharing.revision"}  # docs/sharing/limits.md; not for a file
EXAMPLES: Final = {  # whose values on the page are no defaults
    "state", "pid_file", "listen.host", "standby.lease", "standby.hosts", "policy.options", "policy.outside", "sharing.projects",
    "sharing.classes", "webhooks", "address", "cores", "run", "work", "key", "checkpoints",
    "python", "states_port", "fence_s", "metrics", "controller.host", "labels", "places.cpus",
    "places.memory_bytes", "notice.file", "notice.on_term_s", "containers.engine",
    "containers.options", "jobs.run_as", "jobs.trust_each_other", "jobs.memory_bytes",
    "jobs.disk_bytes", "jobs.pids", "jobs.files", "jobs.cgroup", "jobs.variables", "jobs.users",
}  # fmt: skip


def with_comments(text: str) -> str:
    """The file with its commented settings in force."""
    return re.sub(r"^# (?=\w+ = |\[)", "", text, flags=re.MULTILINE)


def values(settings: msgspec.Struct, above: str = "") -> dict[str, object]:
    """Each setting under its dotted name."""
    found: dict[str, object] = {}
    for field in settings.__struct_fields__:
        value = getattr(settings, field)
        inner = isinstance(value, msgspec.Struct) and field not in {"workdir", "user_limits"}
        found |= values(value, f"{above}{field}.") if inner else {f"{above}{field}": value}
    return found


def holds(table: dict[str, Any], name: str) -> bool:
    """True if a table of TOML has a key of this dotted name."""
    return reduce(lambda inner, key: inner.get(key, {}), name.split("."), table) != {}


@pytest.mark.parametrize(("page", "names"), [
    ("settings.md", ["controller", "agent"]),
    ("install.md", ["client"]),
])  # fmt: skip
def test_a_page_shows_the_samples_without_their_heads(page: str, names: list[str]) -> None:
    blocks = FENCE.findall((PAGES / page).read_text(encoding="utf-8"))
    samples = [(SAMPLES / f"{name}.toml").read_text("utf-8") for name in names]

    assert [block for language, block in blocks if language == "toml"] == [
        text.partition("\n\n")[2] for text in samples
    ]


def test_a_client_reads_the_sample(tmp_path: Path) -> None:
    sample(into=tmp_path)

    home = find_home(tmp_path)

    assert (home.endpoint, home.key) == ("tcp://10.0.0.1:7702", tmp_path / "keys/alice.key_secret")


def test_samples_are_printed_or_written_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample("agent")
    printed = capsys.readouterr().out
    sample("ones-agent.service")
    unit = capsys.readouterr().out
    sample()

    assert printed == FILES[1]
    assert "ExecStart=" in unit
    assert "ones-agent.service" in capsys.readouterr().out.splitlines()
    sample(into=tmp_path / "new")
    assert (tmp_path / "new" / "agent.toml").read_text() == printed
    with pytest.raises(SettingsError, match="exists"):
        sample(into=tmp_path / "new")
    with pytest.raises(SettingsError, match="no sample 'nothing'"):
        sample("nothing")


@pytest.mark.parametrize(("text", "module", "defaults"), [CONTROLLER, AGENT])
def test_a_file_is_accepted_as_printed(
    tmp_path: Path, text: str, module: Any, defaults: msgspec.Struct
) -> None:
    (tmp_path / "settings.toml").write_text(text, encoding="utf-8")

    assert type(module.load(tmp_path / "settings.toml")) is type(defaults)


@pytest.mark.parametrize(("text", "module", "defaults"), [CONTROLLER, AGENT])
def test_a_file_has_every_setting_with_its_default_or_an_example(
    tmp_path: Path, text: str, module: Any, defaults: msgspec.Struct
) -> None:
    (tmp_path / "settings.toml").write_text(with_comments(text), encoding="utf-8")
    table = tomllib.loads(with_comments(text))
    before, shown = values(defaults), values(module.load(tmp_path / "settings.toml"))

    assert {name for name in before if not holds(table, name)} <= ELSEWHERE
    assert {name for name in before if shown[name] != before[name]} <= EXAMPLES

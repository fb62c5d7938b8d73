"""The complete files of docs/operations/settings.md: each setting is there, with its default or an example."""

from __future__ import annotations

import re
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.service import settings as controller
from nodeagent import settings as agent
from tests.support.documented import FENCE, ROOT

PAGE: Final = (ROOT / "docs" / "operations" / "settings.md").read_text(encoding="utf-8")
FILES: Final = [block for language, block in FENCE.findall(PAGE) if language == "toml"]
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

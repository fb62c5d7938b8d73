"""Rules of sharing in settings: types bound their values, and problems name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.service import settings
from schemas.errors import SettingsError
from schemas.sharing import PriorityClass, Project, Sharing, UserLimits, UserShare


def loaded(folder: Path, text: str) -> Sharing:
    file = folder / "controller.toml"
    file.write_text(text)
    return settings.load(file).sharing


def test_rules_are_read_from_the_settings_of_a_controller(tmp_path: Path) -> None:
    text = """
[sharing]
turn_s = 600.0
[sharing.projects.vision]
weight = 2.0
guaranteed = 4
users = { ann = { weight = 3.0, limit = 2 } }
[sharing.user_limits]
running = 3
submissions_per_minute = 10
[sharing.users.ann]
slots = 8
[sharing.classes.urgent]
rank = 10
roles = ["admin"]
limit = 4
preempts = true
"""
    vision = Project(weight=2.0, guaranteed=4, users={"ann": UserShare(weight=3.0, limit=2)})

    assert loaded(tmp_path, text) == Sharing(
        turn_s=600.0,
        projects={"vision": vision},
        user_limits=UserLimits(running=3, submissions_per_minute=10),
        users={"ann": UserLimits(slots=8)},
        classes={"urgent": PriorityClass(rank=10, roles=("admin",), limit=4, preempts=True)},
    )
    assert loaded(tmp_path, "") == Sharing()


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("half_life_s = 0.0", "half_life_s: Expected `float` >= 60.0"),
        ("turn_s = 0.0", "turn_s: Expected `float` >= 1.0"),
        ("revision = 3", "revision: is counted by the controller"),
        ("projects = { a = { weight = 0.0 } }", "Expected `float` >= 0.01"),
        ("projects = { a = { limit = -1 } }", "Expected `int` >= 0"),
        ("projects = { a = { wieght = 1.0 } }", "wieght"),
        (
            "projects = { a = { guaranteed = 4, limit = 2 } }",
            "projects.a.guaranteed: guarantees 4 slots, but its limit is 2",
        ),
        ("user_limits = { submissions_per_minute = 0 }", "Expected `int` >= 1"),
        ("users = { 'a b' = {} }", "users.a b: 'a b' is not a name"),
        ("classes = { c = {} }", "classes[...].rank: is missing"),
        ("classes = { c = { rank = 1, roles = ['boss'] } }", "classes.c.roles: 'boss' is no role"),
        ("projects = { 'a/b' = {} }", "projects.a/b: 'a/b' is not a name"),
        ("projects = { a = { users = { '' = {} } } }", "projects.a.users.: '' is not a name"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_name(tmp_path: Path, rule: str, problem: str) -> None:
    with pytest.raises(SettingsError) as error:
        loaded(tmp_path, f"[sharing]\n{rule}\n")

    assert problem in str(error.value)

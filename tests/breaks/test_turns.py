"""Cases that take turns: nobody is left out, and a run of a commit can be had again."""

from __future__ import annotations

import pytest

from tests.support import turns
from tests.support.turns import BY_COMMIT, VARIABLE, turn

CASES = ("ordinary", "worst", "none")


@pytest.fixture
def by_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, BY_COMMIT)


def at_commits(monkeypatch: pytest.MonkeyPatch, count: int, of: int | None) -> list[list[str]]:
    had = []
    for number in range(count):
        monkeypatch.setattr(turns, "commit", lambda number=number: f"{number:040x}")
        had.append(turn(CASES, "it", of=of))
    return had


def test_without_turns_everything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    assert turn(CASES, "it") == list(CASES)


@pytest.mark.usefixtures("by_commit")
def test_at_each_commit_one_has_its_turn_and_each_at_some(monkeypatch: pytest.MonkeyPatch) -> None:
    had = at_commits(monkeypatch, 60, None)

    assert {len(cases) for cases in had} == {1}
    assert {case for cases in had for case in cases} == set(CASES)


@pytest.mark.usefixtures("by_commit")
def test_one_in_two_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    had = at_commits(monkeypatch, 60, 2)

    assert {tuple(cases) for cases in had} == {("ordinary", "none"), ("worst",)}


@pytest.mark.usefixtures("by_commit")
def test_different_things_have_their_turns_at_different_commits() -> None:
    assert len({tuple(turn(CASES, f"test {n}")) for n in range(20)}) == len(CASES)


@pytest.mark.usefixtures("by_commit")
def test_at_a_commit_the_turn_is_always_the_same() -> None:
    assert turn(CASES, "it") == turn(CASES, "it")


@pytest.mark.usefixtures("by_commit")
def test_of_nothing_nothing_has_its_turn() -> None:
    assert turn((), "it") == []

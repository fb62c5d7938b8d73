"""Cases that take turns: nobody is left out, and a run of a commit can be had again."""

from __future__ import annotations

import pytest

from tests.support.turns import ALL, turn

CASES = ("ordinary", "worst", "none")
COMMITS = [f"{number:040x}" for number in range(60)]


def test_in_some_commits_every_case_has_its_turn() -> None:
    assert {case for commit in COMMITS for case in turn(CASES, "it", commit=commit)} == set(CASES)


def test_at_a_commit_different_things_have_different_turns() -> None:
    assert len({tuple(turn(CASES, f"test {n}", commit=COMMITS[0])) for n in range(20)}) > 1


def test_at_a_commit_the_turn_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL, raising=False)
    assert turn(CASES, "it") == turn(CASES, "it")
    assert len(turn(CASES, "it")) == 1


def test_all_can_have_their_turn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALL, "all")

    assert turn(CASES, "it") == list(CASES)

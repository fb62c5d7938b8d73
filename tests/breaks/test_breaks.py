"""The list of deliberate breaks fits the code; `run.py` tries them."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

from tests.breaks.run import ROOT, read_breaks

BREAKS = read_breaks()


@cache
def text(path: str) -> str:
    file = ROOT / path
    return file.read_text("utf-8") if file.exists() else ""


def test_each_break_has_one_place_in_the_code() -> None:
    found = {fault.id: text(fault.file).count(fault.old) for fault in BREAKS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_each_break_is_a_fault_of_meaning_and_not_of_syntax() -> None:
    for fault in BREAKS:
        assert fault.new != fault.old
        ast.parse(text(fault.file).replace(fault.old, fault.new), fault.id)


def test_each_break_has_tests() -> None:
    for fault in BREAKS:
        tests = [test.partition("::") for test in fault.tests if test.startswith("tests/")]
        assert tests, fault.id
        for path, _, name in tests:
            assert f"def {name or 'test'}" in text(path), fault.id


def test_each_break_has_a_name_of_its_own_and_the_room_of_its_file() -> None:
    names = Counter(fault.id for fault in BREAKS)
    assert [name for name, count in names.items() if count > 1] == []
    for fault in BREAKS:
        first, second, *_ = fault.file.split("/")
        assert fault.room == (second if first == "controlplane" else first), fault.id

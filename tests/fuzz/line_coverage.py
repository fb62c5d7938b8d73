"""Which lines of some modules an input reaches."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

Line = tuple[str, int, int]  # file, and from which line to which


def files_of(modules: Iterable[str]) -> dict[str, str]:
    """Source files by name of module; of packages those of all that is in them."""
    found = {}
    for name in modules:
        module = importlib.import_module(name)
        if module.__file__ is not None:
            found[name] = module.__file__
        for part in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            inner = importlib.import_module(part.name)
            if inner.__file__ is not None:
                found[part.name] = inner.__file__
    return found


def reached(run: Callable[[bytes], None], data: bytes, files: frozenset[str]) -> set[Line]:
    """The steps from line to line that one input takes in these files."""
    found: set[Line] = set()

    def begin(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if event != "call" or file not in files:
            return None
        before = 0

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "line":
                found.add((file, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    sys.settrace(begin)
    try:
        run(data)
    except Exception:  # noqa: BLE001, S110 - a finding is told elsewhere
        pass
    finally:
        sys.settrace(None)
    return found


def lines_in(file: str) -> set[int]:
    """The lines of functions of a file: those that run as it is imported do not count."""
    with open(file, encoding="utf-8") as source:
        module = compile(source.read(), file, "exec")
    return {line for code in _functions(module) for *_, line in code.co_lines() if line} - {
        code.co_firstlineno for code in _functions(module)
    }


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class
                yield inner
            yield from _functions(inner)

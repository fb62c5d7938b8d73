"""Errors in one line."""

from __future__ import annotations

import pytest

from schemas.errors import MORE_FILES_HINT, SettingsError, one_line_error

IN_A_LOADER = (
    "Caught OSError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    '  File "train.py", line 7, in __getitem__\n'
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/7.npy'\n"
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(), "ValueError"),
        (ValueError("\n first\nsecond\x1b"), "ValueError: first"),
        (SettingsError("no key", "give one"), "SettingsError: no key; give one"),
        (SystemExit("no data at /data: mount it"), "no data at /data: mount it"),
        (ExceptionGroup("of tasks", [ExceptionGroup("of one", [KeyError("a")]), ValueError()]), "KeyError: 'a'"),
        (OSError(24, "Too many open files", "a.npy"), f"OSError: [Errno 24] Too many open files: 'a.npy'; {MORE_FILES_HINT}"),
        (
            OSError(IN_A_LOADER),
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/7.npy' (Caught OSError in DataLoader worker process 0)",
        ),
    ],
)  # fmt: skip
def test_an_error_is_described_by_its_cause_in_one_line(error: BaseException, line: str) -> None:
    assert one_line_error(error) == line

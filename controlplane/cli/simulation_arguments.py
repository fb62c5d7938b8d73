"""Arguments of `ones sim` as values: seeds, sizes, policies and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.policy.registry import entry
from schemas.errors import BadFieldError

MOST_NUMBERS: Final = 10_000
MOST_DIGITS: Final = 15
MOST_WORKERS: Final = 1024


def check_run(
    names: Sequence[str], ours: str, seeds: Sequence[int], workers: int, plots: Path | None
) -> None:
    """Refuse before anything is simulated what could not be shown afterwards.

    Raises:
        OnesError: naming the option.
    """
    if not names:
        raise BadFieldError("no policies", "give names with commas between them", "policies")
    for name in names:
        entry(name)
    if ours not in names:
        what = f"{ours!r} is none of {', '.join(names)}"
        raise BadFieldError(what, "give --ours NAME, one of these", "ours")
    if min(seeds) < 0:
        raise BadFieldError(f"seed {min(seeds)} is negative", "give 0 or more", "seed")
    if not 1 <= workers <= MOST_WORKERS:
        what = f"{workers} processes at a time"
        raise BadFieldError(what, f"give 1 to {MOST_WORKERS}", "workers")
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFieldError(f"{plots}: {error.strerror}", "give a folder", "plots") from None


def numbers(text: str, field: str) -> list[int]:
    """1,3,5-7 as numbers, each once.

    Raises:
        BadFieldError: if they make no sense; it names `field`.
    """
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise BadFieldError(f"{field} {text!r} make no sense", "as in 0-4 or 1,3,7", field)
        numbers = range(int(low), int(high or low) + 1)
        if not 1 <= len(numbers) <= MOST_NUMBERS or len(low) > MOST_DIGITS:
            hint = f"as in 0-4, with at most {MOST_NUMBERS} numbers"
            raise BadFieldError(f"{field} {text!r} make no sense", hint, field)
        found += numbers
    return list(dict.fromkeys(found))


def policy_options(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as settings; a value is JSON if it can be, else text.

    Raises:
        BadFieldError: if one has no value.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadFieldError(f"option {text!r} has no value", "give NAME=VALUE", "option")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def options_by_policy(given: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """POLICY.NAME=VALUE as settings of each policy.

    Raises:
        BadFieldError: if one is of no policy among `names`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in policy_options(given).items():
        policy, dot, option = name.partition(".")
        if not dot or policy not in names:
            what = f"option {name!r} is for none of {', '.join(names)}"
            raise BadFieldError(what, "give POLICY.NAME=VALUE", "option")
        found.setdefault(policy, {})[option] = value
    return found

"""`ones policy`: which policy plans, and its exchange while jobs train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from controlplane.cli.output import COMMON, Common, say
from controlplane.client import BlockingClient
from controlplane.client.formats import second
from schemas.errors import BadFieldError
from schemas.wire.client import PolicyInfo

SET_HELP: Final = "option of the policy, such as limits=[3600,86400]; repeatable"

policy = App(name="policy", help="Show which policy plans, or choose another one.")


@policy.default
@policy.command
def show(*, common: Common = COMMON) -> None:
    """Show which policy plans, its options, and who chose it."""
    with BlockingClient(common.home) as client:
        _say(client.policy(), common)


@policy.command(name="set")
def set_(
    name: str,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", help=SET_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Let policy NAME plan from now on (admins); jobs go on.

    The choice stays until the settings file of the controller names another policy.
    """
    with BlockingClient(common.home) as client:
        _say(client.choose_policy(name, policy_options(set_ or ())), common)


def policy_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE settings; a value that is not valid JSON is text."""
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


def _say(info: PolicyInfo, common: Common) -> None:
    options = "" if info.options == "{}" else f" {info.options}"
    chosen = f"set by {info.by}" if info.by else "of the settings file"
    lines = [f"{info.name}{options}", f"{chosen}, since {second(info.since)}"]
    if info.by:
        lines.append(f"the settings file says {info.in_file}")
    say(common, info, *lines, quiet=[info.name])

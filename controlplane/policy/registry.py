"""Policy name to factory; a policy is imported when it is asked for.

What a job will get under a policy that needs something which it lacks, for its user.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args, get_type_hints

import msgspec

from controlplane.policy.api import Oracle, Policy
from controlplane.policy.min_slots import RestoringPolicy
from controlplane.policy.placement.placers import LEARNING_PLACERS
from schemas.errors import SettingsError, suggestion

Need = Literal["losses", "utility"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a policy is."""

    factory: str  # module:class, called with its options
    options: str  # module:struct
    searches: bool = False  # takes long enough for a process of its own
    epochs: bool = False  # the end of an epoch may change its plan
    rebatches: bool = False  # chooses batches again between plans
    batch: Literal["fixed", "elastic"] = "fixed"  # whether it may choose another one than the user
    oracle: Literal["no", "may", "must"] = "no"  # ask one; "must": in a simulation only
    gangs: bool = False  # of the wanted size, which it never changes
    needs: tuple[Need, ...] = ()  # of jobs; one that lacks it is told what it will get

    @property
    def admits(self) -> bool:
        """Whether it may reject jobs, by what their end is worth."""
        return "utility" in self.needs


POLICIES: Final[Mapping[str, Entry]] = {
    "fifo": Entry(
        "controlplane.policy.baselines.fifo:Fifo",
        options="controlplane.policy.baselines.fifo:FifoOptions",
        gangs=True,
    ),
    "drl": Entry(
        "controlplane.policy.learned.drl:Drl",
        options="controlplane.policy.learned.drl:DrlOptions",
        searches=True,
        epochs=True,
    ),
    "optimus": Entry(
        "controlplane.policy.baselines.optimus:Optimus",
        options="controlplane.policy.options:OptimusOptions",
        searches=True,
        epochs=True,
        oracle="may",
    ),
    "fair": Entry(
        "controlplane.policy.baselines.fair:Fair",
        options="controlplane.policy.baselines.fair:FairOptions",
    ),
    "harmony": Entry(
        "controlplane.policy.harmony.policy:Harmony",
        options="controlplane.policy.options:HarmonyOptions",
        searches=True,
        oracle="may",
        gangs=True,
    ),
    "gittins": Entry(
        "controlplane.policy.baselines.gittins:Gittins",
        options="controlplane.policy.baselines.gittins:GittinsOptions",
        gangs=True,
    ),
    "goodput": Entry(
        "controlplane.policy.baselines.goodput:Goodput",
        options="controlplane.policy.options:GoodputOptions",
        searches=True,
        epochs=True,
        batch="elastic",
    ),
    "harmony-drl": Entry(
        "controlplane.policy.learned.harmony_drl:HarmonyDrl",
        options="controlplane.policy.learned.harmony_drl:HarmonyDrlOptions",
        searches=True,
        gangs=True,
    ),
    "slaq": Entry(
        "controlplane.policy.slaq.policy:Slaq",
        options="controlplane.policy.options:SlaqOptions",
        searches=True,
        epochs=True,
        needs=("losses",),
    ),
    "srtf": Entry(
        "controlplane.policy.baselines.srtf:Srtf",
        options="controlplane.policy.baselines.srtf:SrtfOptions",
        gangs=True,
        oracle="must",
    ),
    "tiresias": Entry(
        "controlplane.policy.baselines.tiresias:Tiresias",
        options="controlplane.policy.baselines.tiresias:TiresiasOptions",
        gangs=True,
    ),
    "oasis": Entry(
        "controlplane.policy.oasis.policy:Oasis",
        options="controlplane.policy.options:OasisOptions",
        searches=True,
        needs=("utility",),
    ),
    "ones": Entry(
        "controlplane.policy.ones.policy:Ones",
        options="controlplane.policy.options:OnesOptions",
        searches=True,
        epochs=True,
        rebatches=True,
        batch="elastic",
    ),
    "ones-paper": Entry(
        "controlplane.policy.ones_paper.policy:OnesPaper",
        options="controlplane.policy.options:OnesPaperOptions",
        searches=True,
        epochs=True,
        batch="elastic",
    ),
}


def entry(name: str) -> Entry:
    """Where the policy of that name is.

    Raises:
        SettingsError: if there is none.
    """
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise SettingsError(
            f"unknown policy {name!r}",
            suggestion(name, POLICIES, f"choose one of {known}"),
            "policy",
        ) from None


def make(
    name: str, options: Mapping[str, Any] | None = None, oracle: Oracle | None = None
) -> Policy:
    """A new policy of that name, which brings jobs that lost members back to their least slots.

    Args:
        options: of the policy; those that are left out have its defaults.
        oracle: in a simulation; None in a cluster.

    Raises:
        SettingsError: if there is no such policy, it needs an oracle, or an option is unknown or
            out of its range.
    """
    found = entry(name)
    if oracle is None:
        check_for_cluster(name, options or {})
    factory = _load(found.factory)
    chosen = check_options(name, options or {})
    known = {} if found.oracle == "no" else {"oracle": oracle}
    policy = cast("Policy", factory(chosen, **known))
    return RestoringPolicy(policy, gangs=found.gangs)


def check_for_cluster(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what only a simulation can do.

    Raises:
        SettingsError: if there is no such policy, or nobody in a cluster can tell it what it asks.
    """
    if entry(name).oracle == "must":
        what = f"policy {name!r} needs to know how long jobs will last, which no cluster does"
        raise SettingsError(what, "use it with `ones sim`; choose another one here", "policy")
    if "oracle" in options.values():
        what = f"policy.options of {name}: no cluster has an oracle"
        raise SettingsError(what, "use it with `ones sim`; leave it out here", "policy.options")


def check_options(name: str, options: Mapping[str, Any]) -> Any:
    """`options` as the policy takes them.

    Raises:
        SettingsError: if an option is unknown, of the wrong type or out of its range.
    """
    struct = _load(entry(name).options)
    try:
        return msgspec.convert(dict(options), struct)
    except msgspec.ValidationError as error:
        what = f"policy.options of {name}: {error}"
        raise SettingsError(what, _known(struct, str(error)), "policy.options") from None


def hears_steps(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the policy, or its placer, learns from telemetry between epochs.

    Raises:
        SettingsError: if there is no such policy.
    """
    return entry(name).searches or options.get("placer") in LEARNING_PLACERS


def _known(struct: Any, error: str) -> str:
    """What may be given instead: values of the option that is wrong, else options."""
    wrong = re.search(r"Invalid enum value .* - at `\$\.(\w+)`", error)
    if wrong is None:
        return f"known: {', '.join(struct.__struct_fields__)}"
    return f"choose one of {', '.join(get_args(get_type_hints(struct)[wrong[1]]))}"


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def job_notes(
    policy: str,
    needs: tuple[Need, ...],
    *,
    utility_stated: bool,
    epochs: int = 0,
    train_loss: float | None = None,
) -> tuple[str, ...]:
    """One sentence for each need of the policy that a job does not meet.

    Args:
        needs: of jobs, as the registry has them.
        utility_stated: whether the user said what the job's end is worth.
        train_loss: that it reported last; None: none yet.

    Returns:
        In the order of `needs`; empty if it lacks nothing.
    """
    lacking = {
        "utility": None if utility_stated else _no_utility(policy),
        "losses": _no_losses(policy, epochs, train_loss),
    }
    return tuple(note for need in needs if (note := lacking[need]) is not None)


def _no_utility(policy: str) -> str:
    return (
        f"no utility stated: {policy} accepts it, promises it no end, and gives it what promised "
        "jobs leave; "
        "`utility` in the job file says what its end is worth"
    )


def _no_losses(policy: str, epochs: int, train_loss: float | None) -> str | None:
    """Nobody can say before a job runs whether it will report losses."""
    if train_loss is None and not epochs:
        until = "it has at least a fair share until it reports some"
        return f"{policy} shares slots by training losses: {until}"
    if train_loss is not None and math.isfinite(train_loss):
        return None
    many = f"{epochs} epoch{'s' * (epochs != 1)}"
    what = f"no loss in {many}" if train_loss is None else f"its loss is {train_loss}"
    return (
        f"{what}: under {policy}, which shares slots by training losses, it has a fair share; "
        "`agent.report(loss=...)` tells one"
    )

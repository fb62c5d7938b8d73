"""Registry of policies by name, and notes for jobs that do not meet a policy's needs.

A policy's module is imported when the policy is made.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_type_hints

import msgspec

from controlplane.policy.api import Oracle, Policy
from controlplane.policy.min_slots import MinSlotsPolicy
from controlplane.policy.placement.placers import LEARNING_PLACERS
from schemas.errors import SettingsError, suggestion

Need = Literal["losses", "utility"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a policy's code, and the properties of the policy."""

    factory: str  # module:class in this package, called with its options
    options: str  # module:struct in this package
    searches: bool = False  # True: slow enough to need its own process
    epochs: bool = False  # True: the plan can change at the end of an epoch
    rebatches: bool = False  # True: adjusts batches between plans
    batch: Literal["fixed", "elastic"] = "fixed"  # elastic: may differ from the user's batch
    oracle: Literal["no", "may", "must"] = "no"  # use of an oracle; "must": simulation only
    gangs: bool = False  # True: gives a job exactly its wanted slots or none
    needs: tuple[Need, ...] = ()  # what it needs of jobs; see `job_notes`

    @property
    def admits(self) -> bool:
        """True if the policy rejects jobs with too little utility."""
        return "utility" in self.needs


POLICIES: Final[Mapping[str, Entry]] = {
    "fifo": Entry("baselines.fifo:Fifo", "baselines.fifo:FifoOptions", gangs=True),
    "drl": Entry("learned.drl:Drl", "learned.drl:DrlOptions", searches=True, epochs=True),
    "optimus": Entry(
        "baselines.optimus:Optimus", "options:OptimusOptions", searches=True, epochs=True,
        oracle="may",
    ),
    "fair": Entry("baselines.fair:Fair", "baselines.fair:FairOptions"),
    "harmony": Entry(
        "harmony.policy:Harmony", "options:HarmonyOptions", searches=True, oracle="may", gangs=True
    ),
    "gittins": Entry("baselines.gittins:Gittins", "baselines.gittins:GittinsOptions", gangs=True),
    "goodput": Entry(
        "baselines.goodput:Goodput", "options:GoodputOptions", searches=True, epochs=True,
        batch="elastic",
    ),
    "pollux": Entry(
        "baselines.pollux:Pollux", "options:PolluxOptions", searches=True, rebatches=True,
        batch="elastic",
    ),
    "harmony-drl": Entry(
        "learned.harmony_drl:HarmonyDrl", "learned.harmony_drl:HarmonyDrlOptions", searches=True,
        gangs=True,
    ),
    "slaq": Entry(
        "slaq.policy:Slaq", "options:SlaqOptions", searches=True, epochs=True, needs=("losses",)
    ),
    "srtf": Entry("baselines.srtf:Srtf", "baselines.srtf:SrtfOptions", gangs=True, oracle="must"),
    "tiresias": Entry(
        "baselines.tiresias:Tiresias", "baselines.tiresias:TiresiasOptions", gangs=True
    ),
    "oasis": Entry(
        "oasis.policy:Oasis", "options:OasisOptions", searches=True, needs=("utility",)
    ),
    "ones": Entry(
        "ones.policy:Ones", "options:OnesOptions", searches=True, epochs=True, rebatches=True,
        batch="elastic",
    ),
    "ones-paper": Entry(
        "ones_paper.policy:OnesPaper", "options:OnesPaperOptions", searches=True, epochs=True,
        batch="elastic",
    ),
}  # fmt: skip


def entry(name: str) -> Entry:
    """Return the registry entry of a policy.

    Raises:
        SettingsError: if there is no policy of that name.
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
    """Return a new policy, wrapped so that jobs that lost members return to their minimum slots.

    Args:
        options: options of the policy; missing options have their defaults.
        oracle: ground truth of a simulation; None in a cluster.

    Raises:
        SettingsError: if there is no such policy, if the policy needs an oracle, or if an option is
            unknown or out of its range.
    """
    found = entry(name)
    if oracle is None:
        check_for_cluster(name, options or {})
    chosen = check_options(name, options or {})
    known = {} if found.oracle == "no" else {"oracle": oracle}
    policy = _load(found.factory)(chosen, **known)
    return MinSlotsPolicy(policy, gangs=found.gangs)


def check_for_cluster(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a policy or options that work only in a simulation.

    Raises:
        SettingsError: if there is no such policy, or if the policy needs an oracle.
    """
    if entry(name).oracle == "must":
        problem = f"policy {name!r} needs to know how long jobs will last, which no cluster does"
        raise SettingsError(problem, "use it with `ones sim`; choose another one here", "policy")
    if "oracle" in options.values():
        problem = f"policy.options of {name}: no cluster has an oracle"
        raise SettingsError(problem, "use it with `ones sim`; leave it out here", "policy.options")


def check_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return `options` as the policy's options struct.

    Raises:
        SettingsError: if an option is unknown, of the wrong type or out of its range.
    """
    struct = _load(entry(name).options)
    try:
        return msgspec.convert(dict(options), struct)
    except msgspec.ValidationError as error:
        wrong = re.search(r"Invalid enum value .* - at `\$\.(\w+)`", str(error))
        remedy = f"known: {', '.join(struct.__struct_fields__)}"
        if wrong is not None:
            remedy = f"choose one of {', '.join(get_args(get_type_hints(struct)[wrong[1]]))}"
        problem = f"policy.options of {name}: {error}"
        raise SettingsError(problem, remedy, "policy.options") from None


def hears_steps(name: str, options: Mapping[str, Any]) -> bool:
    """True if the policy or its placer learns from telemetry between epochs.

    Raises:
        SettingsError: if there is no such policy.
    """
    return entry(name).searches or options.get("placer") in LEARNING_PLACERS


def _load(location: str) -> Any:
    return pkgutil.resolve_name(f"controlplane.policy.{location}")


def job_notes(
    policy: str,
    needs: tuple[Need, ...],
    *,
    utility_stated: bool,
    epochs: int = 0,
    train_loss: float | None = None,
) -> tuple[str, ...]:
    """Return one sentence for each need that a job does not meet, in the order of `needs`.

    Args:
        utility_stated: True if the job file states a `utility`, which is the value of the job as a
            function of its completion time.
        train_loss: latest reported loss; None: no report yet.
    """
    no_utility = (
        f"no utility stated: {policy} accepts it, promises it no end, and gives it what promised "
        "jobs leave; `utility` in the job file says what its end is worth"
    )
    lacking = {
        "utility": None if utility_stated else no_utility,
        "losses": _no_losses(policy, epochs, train_loss),
    }
    return tuple(note for need in needs if (note := lacking[need]) is not None)


def _no_losses(policy: str, epochs: int, train_loss: float | None) -> str | None:
    """Return a note if a job reports no usable loss; before the first epoch, it still might."""
    if train_loss is None and not epochs:
        until = "it has at least a fair share until it reports some"
        return f"{policy} shares slots by training losses: {until}"
    if train_loss is not None and math.isfinite(train_loss):
        return None
    many = f"{epochs} epoch{'s' * (epochs != 1)}"
    problem = f"no loss in {many}" if train_loss is None else f"its loss is {train_loss}"
    return (
        f"{problem}: under {policy}, which shares slots by training losses, it has a fair share; "
        "report it with `agent.report(loss=...)`"
    )

"""Registry of policies by name, and notes for jobs that do not meet a policy's needs.

A policy is part of this package (`POLICIES`), or it comes from outside: as the import string
`module:Class`, as an entry point of the group `ones.policies`, or as a class. A policy's module is
imported when the policy is made; of a policy from outside, its class attributes are the entry.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final, Literal, get_args, get_type_hints

import msgspec

from controlplane.policy.api import ImmediatePolicy, Oracle, Policy
from controlplane.policy.guard import GuardedPolicy, cause_in_words
from controlplane.policy.min_slots import MinSlotsPolicy
from controlplane.policy.placement.placers import LEARNING_PLACERS
from schemas.errors import OnesError, SettingsError, suggestion

Need = Literal["losses", "utility"]


class NoOptions(msgspec.Struct, frozen=True):
    """Options of a policy that declares none."""


class Entry(msgspec.Struct, frozen=True):
    """Code and properties of a policy."""

    factory: Any  # module:class in this package, or a class; called with the options
    options: Any  # module:struct in this package, or a struct
    searches: bool = False  # True: `improve` does something, too slow for the controller's process
    epochs: bool = False  # True: the plan can change at the end of an epoch
    rebatches: bool = False  # True: adjusts batches between plans
    telemetry: bool = False  # True: learns from telemetry between epochs, as each `searches` does
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


PACKAGE: Final = "controlplane.policy."
ENTRY_POINTS: Final = "ones.policies"
METHODS: Final = ("observe", "improve", "plan", "batches", "stats")
PAGE: Final = "docs/policies/own.md has an example"
NOT_FOUND: Final = (
    "`ones sim` imports from the current folder and its environment, a controller only from its "
    "environment: install the module there, or name its folder in PYTHONPATH"
)


def entry(policy: str | type[Policy]) -> Entry:
    """Return the properties of a policy.

    Raises:
        SettingsError: if there is no such policy, or if its code cannot be used.
    """
    if isinstance(policy, type):
        return _entry_of(policy, name_of(policy))
    return POLICIES.get(policy) or _entry_of(_import(policy), policy)


def name_of(policy: str | type[Policy]) -> str:
    """Return the name of a policy in results and messages."""
    return policy if isinstance(policy, str) else policy.__name__


def make(
    policy: str | type[Policy],
    options: Mapping[str, Any] | None = None,
    oracle: Oracle | None = None,
) -> Policy:
    """Return a new policy, wrapped so that jobs that lost members return to their minimum slots.

    Args:
        options: options of the policy; missing options have their defaults.
        oracle: ground truth of a simulation; None in a cluster.

    Raises:
        SettingsError: if there is no such policy, if the policy needs an oracle, or if an option is
            unknown or out of its range.
    """
    found, name = entry(policy), name_of(policy)
    if oracle is None:
        check_for_cluster(policy, options or {})
    chosen = check_options(policy, options or {})
    arguments = () if isinstance(chosen, NoOptions) else (chosen,)
    known = {} if found.oracle == "no" else {"oracle": oracle}
    if isinstance(found.factory, str):
        return MinSlotsPolicy(_load(found.factory)(*arguments, **known), gangs=found.gangs)
    try:
        made = found.factory(*arguments, **known)
    except (Exception, SystemExit) as error:
        if isinstance(error, OnesError):
            raise
        problem = f"policy {name!r} cannot be made: {cause_in_words(error)}"
        raise SettingsError(problem, PAGE, "policy") from error
    return MinSlotsPolicy(GuardedPolicy(made, name), gangs=found.gangs)


def wrap(policy: Policy) -> tuple[type[Policy], Policy]:
    """Return the class of a policy that exists, and the policy, wrapped as `make` does it.

    A `MinSlotsPolicy` stays as it is, and the class is that of the innermost policy.
    """
    inner = policy
    while isinstance(inner, MinSlotsPolicy):
        inner = inner.policy
    if inner is not policy:
        return type(inner), policy
    guarded = GuardedPolicy(policy, name_of(type(policy)))
    return type(policy), MinSlotsPolicy(guarded, gangs=entry(type(policy)).gangs)


def check_for_cluster(policy: str | type[Policy], options: Mapping[str, Any]) -> None:
    """Refuse a policy or options that work only in a simulation.

    Raises:
        SettingsError: if there is no such policy, or if the policy needs an oracle.
    """
    if entry(policy).oracle == "must":
        needs = "needs to know how long jobs will last, which no cluster does"
        problem = f"policy {name_of(policy)!r} {needs}"
        raise SettingsError(problem, "use it with `ones sim`; choose another one here", "policy")
    if "oracle" in options.values():
        problem = f"policy.options of {name_of(policy)}: no cluster has an oracle"
        raise SettingsError(problem, "use it with `ones sim`; leave it out here", "policy.options")


def check_options(policy: str | type[Policy], options: Mapping[str, Any]) -> Any:
    """Return `options` as the policy's options struct.

    Raises:
        SettingsError: if an option is unknown, of the wrong type or out of its range.
    """
    struct = _load(entry(policy).options)
    about = f"policy.options of {name_of(policy)}"
    remedy = f"known: {', '.join(struct.__struct_fields__) or 'none'}"
    for name in options:
        if name not in struct.__struct_encode_fields__:
            problem = f"{about}: Object contains unknown field `{name}`"
            raise SettingsError(problem, remedy, "policy.options")
    presets, chosen = getattr(struct, "PRESETS", {}), options.get("preset")
    preset = presets.get(chosen, {}) if isinstance(chosen, str) else {}
    try:
        return msgspec.convert({**preset, **options}, struct)
    except msgspec.ValidationError as error:
        wrong = re.search(r"Invalid enum value .* - at `\$\.(\w+)`", str(error))
        if wrong is not None:
            remedy = f"choose one of {', '.join(get_args(get_type_hints(struct)[wrong[1]]))}"
        raise SettingsError(f"{about}: {error}", remedy, "policy.options") from None


def option_names(policy: str | type[Policy]) -> tuple[str, ...]:
    """Return the names of a policy's options.

    Raises:
        SettingsError: if there is no such policy.
    """
    names: tuple[str, ...] = _load(entry(policy).options).__struct_fields__
    return names


def hears_steps(policy: str | type[Policy], options: Mapping[str, Any]) -> bool:
    """True if the policy or its placer learns from telemetry between epochs.

    Raises:
        SettingsError: if there is no such policy.
    """
    found = entry(policy)
    return found.searches or found.telemetry or options.get("placer") in LEARNING_PLACERS


def _load(location: Any) -> Any:
    return pkgutil.resolve_name(PACKAGE + location) if isinstance(location, str) else location


# --- policies from outside this package


def import_string(name: str) -> str:
    """Return the import string `module:Class` of a policy from outside.

    Raises:
        SettingsError: if the name is neither an import string nor an entry point.
    """
    if ":" in name:
        return name
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        known = [*POLICIES, *installed]
        otherwise = f"choose one of {', '.join(sorted(known))}, or name yours as module:Class"
        problem = f"unknown policy {name!r}"
        raise SettingsError(problem, suggestion(name, known, otherwise), "policy")
    return installed[name]


def _import(name: str) -> Any:
    """Return what an import string or an entry point names.

    Raises:
        SettingsError: if there is no such name, or if its module cannot be imported.
    """
    location = import_string(name)
    module_name, _, attribute = location.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError)
        problem = f"policy {name!r}: its module cannot be imported: {cause_in_words(error)}"
        remedy = NOT_FOUND if absent else "correct the module"
        raise SettingsError(problem, remedy, "policy") from error
    if not hasattr(module, attribute):
        classes = [one for one, value in vars(module).items() if not _missing_methods(value)]
        remedy = f"choose one of {', '.join(classes)}" if classes else PAGE
        problem = f"policy {name!r}: {module.__file__} has no {attribute!r}"
        raise SettingsError(problem, suggestion(attribute, classes, remedy), "policy")
    return getattr(module, attribute)


def _entry_of(policy: Any, name: str) -> Entry:
    """Return the properties that a class declares; a subclass inherits those of this package.

    A method that the class overrides is assumed to do something.

    Raises:
        SettingsError: if the object is not the class of a policy, or declares a wrong value.
    """
    if missing := _missing_methods(policy):
        remedy = f"derive it from ImmediatePolicy and write the method; {PAGE}"
        what = f"a class without {', '.join(missing)}" if isinstance(policy, type) else "no class"
        raise SettingsError(f"policy {name!r} is {what}", remedy, "policy")
    ours = {f"{PACKAGE}{known.factory.replace(':', '.')}": known for known in POLICIES.values()}
    bases = (f"{base.__module__}.{base.__qualname__}" for base in policy.__mro__)
    found = next(
        (ours[base] for base in bases if base in ours),
        Entry(
            policy, NoOptions, epochs=True,
            searches=policy.improve is not ImmediatePolicy.improve,
            rebatches=policy.batches is not Policy.batches,
            telemetry=policy.observe is not ImmediatePolicy.observe,
        ),
    )  # fmt: skip
    declared = {
        field: getattr(policy, field) for field in Entry.__struct_fields__ if hasattr(policy, field)
    }
    options = getattr(policy, "Options", _load(found.options))
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise SettingsError(f"policy {name!r}: Options is not a msgspec.Struct", PAGE, "policy")
    given = {**msgspec.structs.asdict(found), **declared, "factory": policy, "options": options}
    try:
        return msgspec.convert(given, Entry)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"policy {name!r}: {error}", f"correct the class; {PAGE}", "policy"
        ) from None


def _missing_methods(policy: Any) -> list[str]:
    """Return the methods that a class must have and lacks; [""] for an object that is no class."""
    if not isinstance(policy, type):
        return [""]
    stubs = {name: getattr(Policy, name) for name in METHODS if name != "batches"}
    found = {name: getattr(policy, name, None) for name in METHODS}
    return [
        name for name, method in found.items() if not callable(method) or method is stubs.get(name)
    ]


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

"""Which planner the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.policy.api import PolicyEvent
from controlplane.policy.registry import check_for_cluster, check_options, entry, make
from controlplane.service.controller_settings import PolicyChoice
from controlplane.service.planner.inline_planner import InlinePlanner
from controlplane.service.planner.planner_interface import Planner, Propose, ViewNow
from controlplane.service.planner.search_planner import SearchPlanner
from schemas.ids import Seconds


def planner_for(
    choice: PolicyChoice,
    *,
    history: Callable[[], list[tuple[Seconds, PolicyEvent]]],
    view_now: ViewNow,
    propose: Propose,
) -> Planner:
    """Whoever plans: a quick policy in this process, a search in one of its own.

    Args:
        choice: the policy's name and options, from the settings file.
        history: what a search learns from again when it begins anew, oldest first.
        view_now: what a policy may see at the moment, and the time.
        propose: takes every plan, with how the search stands (None: there is none, or it is away).

    Raises:
        SettingsError: if there is no such policy or option.
    """
    if not entry(choice.name).searches:
        return InlinePlanner(make(choice.name, choice.options), view_now, propose)
    check_for_cluster(choice.name, choice.options)
    check_options(choice.name, choice.options)
    return SearchPlanner(
        policy=choice.name,
        options=choice.options,
        seed=int(choice.options.get("seed", 0)),
        admits=entry(choice.name).admits,
        history=history,
        view_now=view_now,
        propose=propose,
    )

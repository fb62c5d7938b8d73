"""Reasons of the division, made of the numbers that it compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.policy.api import JobView, Reason
from controlplane.policy.placement.slot_partition import slots_in_words
from controlplane.policy.sharing.caps import Account

MINUTE_S: Final = 60.0
NAMED: Final = 3  # accounts that a reason names


class Reasons:
    """Reasons for jobs that wait (code `budget`) or give up slots (`gave_back`).

    `turn_s` is the length of a turn in seconds.
    """

    def __init__(self, accounts: Mapping[str, Account], turn_s: float) -> None:
        self._accounts = accounts
        self._turn_s = turn_s
        names = list(accounts)
        greedy = [name for name in names if accounts[name].demand > accounts[name].budget]
        self._want = greedy if len(greedy) > 1 else [n for n in names if accounts[n].budget]
        self._lack = [name for name in names if _lacks(accounts[name]) > 0]
        self._lack.sort(key=lambda name: -_lacks(accounts[name]))
        self._waits: dict[str, Reason] = {}  # of the waiting jobs of an account

    def of(self, name: str, job: JobView, shown: JobView) -> Reason:
        """Return the reason for a job of the account `name` that is shown with fewer slots."""
        account, before, after = self._accounts[name], len(job.running_on), len(shown.running_on)
        if not before:
            if name not in self._waits:
                self._waits[name] = self._waits_of(name)
            return self._waits[name]
        text = f"{'' if after else 'paused: '}gives back {slots_in_words(before - after)}"
        takers = _listed(self._lack, name)
        text += f" to {takers}" if takers else ""
        if account.held > account.budget:
            text += f": {words(name)} has {account.held} slots and may have {account.budget}"
        elif not takers:
            minutes = self._turn_s / MINUTE_S
            text += f" to another job of {words(name)} after a turn of {minutes:.0f} min"
        return Reason("gave_back", text, _numbers(account, before, after))

    def _waits_of(self, name: str) -> Reason:
        account = self._accounts[name]
        text = f"waits: {words(name)} has {account.held} of its {slots_in_words(account.budget)}"
        if others := _listed(self._want, name):
            one = len(self._want) - (name in self._want) == 1
            text += f"; {others} want{'s' * one} the rest"
        return Reason("budget", text, _numbers(account, 0, 0))


def _numbers(account: Account, before: int, after: int) -> dict[str, float]:
    return {
        "account_slots": float(account.held),
        "account_budget": float(account.budget),
        "slots_now": float(before),
        "slots_then": float(after),
    }


def words(account: str) -> str:
    """Return an account in words, such as `user alice of project vision`, or `user alice`."""
    project, _, user = account.partition("/")
    return f"user {user}" if project == user else f"user {user} of project {project}"


def _lacks(account: Account) -> int:
    return account.budget - account.held


def _listed(accounts: Sequence[str], but: str) -> str:
    """Return the first accounts in words, except one."""
    named = [words(name) for name in accounts[: NAMED + 1] if name != but][:NAMED]
    more = len(accounts) - (but in accounts) - len(named)
    if more > 0:
        named.append(f"{more} more")
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)

"""Check of a policy and its options, before anything depends on them.

Code from outside this package is imported in a child process only: an import can take any time, end
its process, or change it. The child is `python -P -m controlplane.service.planner.policy_check`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.journal.releases import child_command, child_environment
from controlplane.policy.registry import (
    POLICIES,
    Need,
    check_for_cluster,
    check_options,
    entry,
    import_string,
    make,
)
from schemas.errors import OnesError, SettingsError
from schemas.host.memory import limit_memory

MODULE: Final = "controlplane.service.planner.policy_check"
TIMEOUT_S: Final = 60.0


class CheckedPolicy(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """Properties of a usable policy, for a controller and `ones sim`."""

    apart: bool  # it runs in its own process
    needs: tuple[Need, ...]
    gangs: bool = False  # it gives a job exactly its wanted slots or none
    code: str = ""  # digest of the file of a policy from outside


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    options: dict[str, Any]
    simulated: bool


class _Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    message: str
    hint: str
    field: str


def check_policy(
    policy: str,
    options: Mapping[str, Any],
    *,
    simulated: bool = False,
    code: Path | None = None,
    folder: Path | None = None,
) -> CheckedPolicy:
    """Check a policy, and return what its users need to know.

    Args:
        simulated: False refuses a policy that needs a simulation.
        code: zip file of the child's code; None: the installed code.
        folder: folder from which modules are imported first; None: only from the environment.

    Raises:
        SettingsError: if there is no such policy, or if it or its options cannot be used.
    """
    question = _Question(policy=policy, options=dict(options), simulated=simulated)
    if policy in POLICIES:
        return _checked(question)
    import_string(policy)
    environment = child_environment(code)
    if folder is not None:
        paths = (str(folder), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            child_command(MODULE),
            input=msgspec.json.encode(question),
            capture_output=True,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"policy {policy!r}: its module is not imported within {TIMEOUT_S:.0f} s"
        raise SettingsError(problem, "correct the module", "policy") from None
    if not done.stdout:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        problem = f"policy {policy!r}: its module ended the process, exit code {done.returncode}"
        told = f"{problem}: {last}" if last else problem
        raise SettingsError(told, "correct the module", "policy")
    answer = msgspec.json.decode(done.stdout, type=CheckedPolicy | _Refusal)
    if isinstance(answer, _Refusal):
        raise SettingsError(answer.message, answer.hint, answer.field)
    return answer


def _checked(question: _Question) -> CheckedPolicy:
    policy, options, found = question.policy, question.options, entry(question.policy)
    check_options(policy, options)
    if not question.simulated:
        check_for_cluster(policy, options)
    if policy in POLICIES:
        return CheckedPolicy(apart=found.searches, needs=found.needs, gangs=found.gangs)
    if not question.simulated:
        make(policy, options)
    source = Path(inspect.getfile(found.factory)).read_bytes()
    digest = sha256(source).hexdigest()[:16]
    return CheckedPolicy(apart=True, needs=found.needs, gangs=found.gangs, code=digest)


def main() -> None:
    """Answer the question on standard input."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    sink = os.dup(1)
    os.dup2(2, 1)  # what a module prints is not part of the answer
    limit_memory()
    answer: CheckedPolicy | _Refusal
    try:
        answer = _checked(question)
    except OnesError as error:
        answer = _Refusal(error.message, error.hint, error.field)
    os.write(sink, msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

"""Errors of the agent, and what becomes of those that nobody thought of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from schemas.errors import OnesError

log = structlog.get_logger("agent")


class AgentError(OnesError):
    """Base of what the agent raises on purpose."""

    code = "agent"
    node_fault = False  # the job is not to blame, and another node may well do it


class StartError(AgentError):
    """A worker, or the zygote that would fork it, could not be started."""


class NodeStartError(StartError):
    """The same, for the node's fault."""

    node_fault = True


class WorkspaceError(AgentError):
    """A job's working directory could not be laid out on this node."""


class NodeWorkspaceError(WorkspaceError):
    """The same, for the node's fault."""

    node_fault = True


@contextlib.contextmanager
def passed_over(what: str, **detail: str) -> Iterator[None]:
    """What fails in there is a line in the log, and holds up nothing behind it."""
    try:
        yield
    except Exception:
        log.exception("failed, and passed over", what=what, **detail)

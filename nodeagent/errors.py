"""Errors of the agent, and the log of unexpected errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from schemas.errors import OnesError

log = structlog.get_logger("agent")


class AgentError(OnesError):
    """Base class of the errors that the agent raises on purpose."""

    code = "agent"
    node_fault = False  # True: not caused by the job, so another node might succeed


class StartError(AgentError):
    """A worker, or the zygote that would fork it, could not be started."""


class NodeStartError(StartError):
    """A `StartError` caused by the node."""

    node_fault = True


class WorkspaceError(AgentError):
    """A job's working directory could not be unpacked on this node."""


class NodeWorkspaceError(WorkspaceError):
    """A `WorkspaceError` caused by the node."""

    node_fault = True


@contextlib.contextmanager
def log_errors(what: str, **detail: str) -> Iterator[None]:
    """Log an exception of the `with` block instead of raising it."""
    try:
        yield
    except Exception:
        log.exception("operation failed", what=what, **detail)

"""Errors of the agent."""

from __future__ import annotations

from schemas.errors import OnesError


class AgentError(OnesError):
    """Base of what the agent raises on purpose."""

    code = "agent"


class StartError(AgentError):
    """A worker, or the zygote that would fork it, could not be started."""


class WorkspaceError(AgentError):
    """A job's working directory could not be laid out on this node."""

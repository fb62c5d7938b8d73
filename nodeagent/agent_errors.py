"""Errors of the agent."""

from __future__ import annotations

from schemas.errors import OnesError


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

"""Errors of the training library."""

from __future__ import annotations

from schemas.errors import OnesError


class ElasticError(OnesError):
    """Base of what the library raises on purpose."""

    code = "elastic"


class UsageError(ElasticError):
    """The script uses the library in a way that cannot work."""


class MissingMetricError(ElasticError):
    """The stop rule looks at a metric that the script did not report."""

    def __init__(self, metric: str, reported: tuple[str, ...]) -> None:
        known = ", ".join(reported) or "nothing"
        super().__init__(
            f"the stop rule looks at {metric!r}, the script reported {known}",
            f"pass it to agent.report({metric}=...), or change stop.metric",
            "stop.metric",
        )


class CheckpointError(ElasticError):
    """A checkpoint that a worker should start from cannot be used."""


class BrokenGroupError(ElasticError):
    """A process group could not be built, or a peer of it is gone."""


class CancelledError(ElasticError):
    """A wait was called off: the controller wants this worker at rest."""

    def __init__(self) -> None:
        super().__init__("called off")

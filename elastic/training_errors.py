"""Errors of the training library."""

from __future__ import annotations

from schemas.errors import OnesError


class ElasticError(OnesError):
    """Base of the errors that the library raises on purpose."""

    code = "elastic"


class UsageError(ElasticError):
    """The script uses the library in a way that cannot work."""


class MissingMetricError(ElasticError):
    """The stop rule needs a metric that the script did not report."""

    def __init__(self, metric: str, reported: tuple[str, ...]) -> None:
        known = ", ".join(reported) or "nothing"
        super().__init__(
            f"the stop rule needs the metric {metric!r}, the script reported {known}",
            f"pass it to agent.report({metric}=...), or change stop.metric",
            "stop.metric",
        )


class CheckpointError(ElasticError):
    """A worker cannot use the checkpoint that it should start from."""


class OutOfStepError(ElasticError):
    """The workers of a group executed different operations at the same time."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the workers of the group are out of step: {problem}",
            "take every batch of the loader once, with the same number of backward passes on all "
            "workers; let the data or a stop rule end epochs, not a count of batches in the "
            "script",
        )


class BrokenGroupError(ElasticError):
    """A process group could not be built, or a peer in the group is lost.

    Every collective of a group raises it, and so do the functions that use collectives.
    """


class CancelledError(ElasticError):
    """A wait was cancelled because the controller wants this worker to stop at its current step.

    A function with an argument `cancel` or `cancelled` raises this error when that event is set.
    """

    def __init__(self) -> None:
        super().__init__("the wait was cancelled")

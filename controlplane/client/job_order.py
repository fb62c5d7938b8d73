"""Order of jobs that are submitted together and wait for each other by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from msgspec.structs import replace

from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.jobs import JobSpec


def submission_order(specs: Sequence[JobSpec]) -> list[int]:
    """Return the indices of `specs`, so that each job follows those that it waits for.

    Raises:
        BadFieldError: if jobs wait for each other in a circle, or a name is ambiguous.
    """
    names = Counter(spec.name for spec in specs)
    places = {spec.name: place for place, spec in enumerate(specs)}
    before = {}
    for place, spec in enumerate(specs):
        named = [parent.job for parent in spec.parents if parent.job in places]
        for name in named:
            if names[name] > 1:
                what = f"after: {names[name]} of the files have the name {name!r}"
                raise BadFieldError(what, "give them different names", "after")
        before[place] = [places[name] for name in named]
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = " after ".join(specs[place].name for place in reversed(error.args[1]))
        what = f"after: the jobs wait for each other in a circle: {circle}"
        raise BadFieldError(what, "remove one of these entries", "after") from None


def with_parents(spec: JobSpec, names: Mapping[str, JobId | None]) -> JobSpec:
    """Return `spec` with the jobs of a common submission that it waits for.

    Args:
        names: job of each name, or None if it was not accepted.
    """
    after = []
    for parent in spec.parents:
        job = names.get(parent.job, parent.job)
        if job is None:
            what = f"after: {parent.job} was not submitted, so {spec.name} was not either"
            raise BadFieldError(what, f"correct the job file of {parent.job}", "after")
        after.append(str(parent._replace(job=job)))
    return replace(spec, after=tuple(after)) if after else spec

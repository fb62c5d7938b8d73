"""Whether an order of `ones resize` could ever be followed; what cannot is refused at once."""

from __future__ import annotations

from controlplane.core.model.job import Job
from controlplane.core.state import State
from schemas.errors import BadFieldError
from schemas.messages.client import ResizeJob


def check_resize(state: State, job: Job, request: ResizeJob) -> None:
    """Refuse an order that could never be followed.

    Args:
        request: slots (0 pauses), global batch in samples, exact places; each may be left out.

    Raises:
        BadFieldError: naming the field and the bound.
    """
    least, most = job.spec.slots
    size = len(request.on) if request.on else request.slots
    if request.on and request.slots not in {None, len(request.on)}:
        what = f"slots: {request.slots} is not the number of slots in `on`, {len(request.on)}"
        raise BadFieldError(what, "leave one of them out", "slots")
    if size is None and request.batch is None:
        raise BadFieldError("slots: nothing is asked for", "give slots, batch or both", "slots")
    if size is not None and size != 0 and not least <= size <= most:
        what = f"slots: {size} is outside the job's slots [{least}, {most}]"
        raise BadFieldError(what, f"choose {least} to {most}, or 0 to pause it", "slots")
    known = state.slot_index.slots()
    for slot in request.on:
        if slot not in known:
            what = f"on: there is no slot {slot[:80]!r}"
            raise BadFieldError(what, "give NODE/INDEX as in `ones show`", "on")
    if len(set(request.on)) != len(request.on):
        raise BadFieldError("on: a slot is given twice", "give each once", "on")
    if size is not None and size > len(known):
        what = f"slots: the cluster has {len(known)}, not {size}"
        raise BadFieldError(what, "choose fewer, or add nodes", "slots")
    batch = request.batch
    if batch is not None and size != 0:
        now = len(job.group.members) if job.group else least
        lowest = max(1, size if size is not None else now)
        if not lowest <= batch <= job.spec.batch_limit:
            what = f"batch: {batch} is outside {lowest} to {job.spec.batch_limit}"
            most_of = "max_batch_size of the job file"
            if job.spec.batch_limit_is_left_open:
                most_of = "what fits its slots, where the job file has no max_batch_size"
            hint = f"at least one sample for each slot, at most {most_of}"
            raise BadFieldError(what, hint, "batch")

"""Orders of a size that a job cannot have."""

from __future__ import annotations

import pytest

from controlplane.service.api.changes import check_resize
from schemas.errors import BadFieldError
from schemas.wire.client import ResizeJob
from tests.support.builders import A
from tests.support.controller import running


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (None, "what fits its slots, where the job file has no max_batch_size"),
        (128, "max_batch_size of the job file"),
    ],
)
def test_the_refusal_of_a_batch_names_the_source_of_its_bound(limit: int | None, most: str) -> None:
    controller = running(max_batch_size=limit)

    with pytest.raises(BadFieldError) as error:
        check_resize(controller.reactor.state, controller.job(A), ResizeJob(job=A, batch=4096))

    assert error.value.hint == f"at least one sample for each slot, at most {most}"

from __future__ import annotations

from controlplane.service.api.fair_queue import MAX_SAID, failure_reply
from schemas.codec import encode
from schemas.errors import BadFieldError, UnknownJobError
from schemas.wire.client import Failed


def test_a_refusal_names_problem_and_field() -> None:
    error = BadFieldError("slots: 3 is outside", "choose 1 to 2", "slots")

    assert failure_reply(error) == Failed(
        code="bad_field", message="slots: 3 is outside", hint="choose 1 to 2", field="slots"
    )


def test_a_refusal_of_long_text_is_short() -> None:
    error = UnknownJobError("\0" * (4 << 20))

    assert len(encode(failure_reply(error))) < 2 * MAX_SAID

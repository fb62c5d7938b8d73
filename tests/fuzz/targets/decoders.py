"""Every decoder of bytes that somebody else wrote: a message, or an error that can be told."""

from __future__ import annotations

import msgspec

from schemas.codec import CODECS, encode
from schemas.errors import MalformedMessageError
from schemas.wire.client import Failed
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import hostile_bytes


def messages(data: bytes) -> None:
    """What is decoded is written the same again; what is not is refused in words that travel."""
    choices = Choices(data)
    codec = choices.pick(CODECS)
    told = hostile_bytes(choices, codec.tags)
    try:
        message = codec.decode(told)
    except MalformedMessageError as error:
        failed = Failed(code=error.code, message=error.message, hint=error.hint, field=error.field)
        assert len(encode(failed)) < 16_384
        return
    try:
        again = encode(message)
    except OverflowError:  # a number of more than 64 bits that no field has a bound for
        raise AssertionError("decoded, and cannot be written") from None
    assert encode(codec.decode(again)) == again
    msgspec.to_builtins(message)

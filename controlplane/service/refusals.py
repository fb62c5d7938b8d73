"""What a client is told of a request that was not done."""

from __future__ import annotations

from typing import Final

from schemas.errors import OnesError
from schemas.messages.client import Failed

MAX_SAID: Final = 2000  # characters of each text: some repeat what was asked for


def failed(error: OnesError) -> Failed:
    """The reply for it.

    Args:
        error: why it was not done.
    """
    message, hint, field = (text[:MAX_SAID] for text in (error.message, error.hint, error.field))
    return Failed(code=error.code, message=message, hint=hint, field=field)

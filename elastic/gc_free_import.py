"""Imports without the garbage collector, which would look through all that torch defines, often."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def imports_uncollected() -> Iterator[None]:
    """No garbage is collected inside: what an import makes stays, so looking through it is in vain.

    A tenth of the processor time of `import torch` and of its compiler is the collector's.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

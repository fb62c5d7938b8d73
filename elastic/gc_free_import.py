"""Imports without the garbage collector, which would traverse all objects of torch many times."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_free_import() -> Iterator[None]:
    """Disable the garbage collector in this context, because imported objects are never freed.

    The collector takes a tenth of the processor time of `import torch` and of its compiler.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

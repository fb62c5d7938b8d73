"""Let a dataset read as it would without loader workers, inside of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker


@contextlib.contextmanager
def without_worker_info() -> Iterator[None]:
    """`torch.utils.data.get_worker_info()` gives None meanwhile: who asks gives every sample."""
    info = get_worker_info()
    worker._worker_info = None  # noqa: SLF001 - what get_worker_info() reads
    try:
        yield
    finally:
        worker._worker_info = info  # noqa: SLF001

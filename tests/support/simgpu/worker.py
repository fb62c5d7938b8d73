"""What a training script imports first in a test on the simulated device: workers then use it."""

from __future__ import annotations

import functools

from elastic.collectives.backends import register
from elastic.collectives.nccl import NcclBackend
from tests.support.simgpu.device import NAME
from tests.support.simgpu.nccl_double import ProcessGroupNCCL

register(NAME, functools.partial(NcclBackend, make=ProcessGroupNCCL))

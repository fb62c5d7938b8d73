"""Run a training script as on a slow device: `paced.py SAMPLES_PER_S SCRIPT`.

A pass over n samples, forward and backward, lasts at least n / SAMPLES_PER_S seconds. The worker
sleeps for the rest before its gradients are summed with those of others, as it would wait for a
GPU. So a job that grows gets faster on any host, however few its cores. What is computed stays the
same.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Pace:
    """Makes passes last as long as on a device of a given speed.

    Args:
        samples_per_s: of the device.
        clock: seconds, any origin.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        samples_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._samples_per_s = samples_per_s
        self._clock = clock
        self._sleep = sleep
        self._ends_at: float | None = None  # of the present pass

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note when a pass begins: where a model is called, before all modules inside it."""
        if self._ends_at is None and torch.is_grad_enabled():
            self._ends_at = self._clock() + len(inputs[0]) / self._samples_per_s

    def end(self) -> None:
        """Wait until the present pass is over on the device."""
        if self._ends_at is not None:
            self._sleep(max(0.0, self._ends_at - self._clock()))
            self._ends_at = None


def pace_torch(pace: Pace) -> RemovableHandle:
    """Have every pass of this process last as long as `pace` says; return the hook on models."""
    hook = register_module_forward_pre_hook(pace.begin)
    original = torch.autograd.backward

    def backward(*args: Any, **options: Any) -> None:
        original(*args, **options)
        pace.end()

    torch.autograd.backward = backward  # the library wraps this one: gradients are summed after it
    return hook


def main() -> None:
    """Run the script that the command line names."""
    speed, script = float(sys.argv[1]), Path(sys.argv[2]).resolve()
    pace_torch(Pace(speed))
    sys.argv = [str(script), *sys.argv[3:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

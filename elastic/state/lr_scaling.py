"""The learning rate follows the batch (ONES section 3.3.2), without a jump that spikes the loss.

The rate that script and schedulers see stays in terms of the job's first batch; a factor is applied
around each optimizer step only, so no scheduler can undo it or count it twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

LrScaling = Literal["linear", "sqrt", "none"]
DOUBLING_STEPS: Final = 20


def lr_factor(rule: LrScaling, batch: int, base: int) -> float:
    """What the rate at `base` samples per step is multiplied with at `batch`.

    Linear is the paper's, for SGD; the square root is for optimizers that divide by the gradient's
    own size (Adam and its kin), which the paper does not treat.

    Args:
        rule: "linear" (ONES section 3.3.2), "sqrt" or "none".
        batch: global batch, samples per step.
        base: samples per step that the rate is meant for; 0 or less: nothing is scaled.
    """
    if rule == "none" or base <= 0:
        return 1.0
    ratio = batch / base
    return ratio if rule == "linear" else math.sqrt(ratio)


@dataclass(frozen=True, slots=True)
class LrRamp:
    """A factor on its way: down at once, up by at most 2x in `doubling` steps.

    Paper: the rate is scaled at once; its figures 13 and 14 show that a large jump spikes the loss.
    `doubling = 0` is the paper's way.
    """

    begin: float = 1.0
    to: float = 1.0
    since: int = 0  # step at which it began
    doubling: int = DOUBLING_STEPS

    def at(self, step: int) -> float:
        """The factor in force for `step`.

        Args:
            step: 1-based, of all epochs.
        """
        if self.to <= self.begin or self.doubling <= 0:
            return self.to
        doublings = max(0, step - self.since) / self.doubling
        if doublings >= math.log2(self.to / self.begin):
            return self.to
        return float(self.begin * 2.0**doublings)

    def towards(self, to: float, step: int) -> LrRamp:
        """From where the factor is at `step`, to another target.

        Args:
            step: behind which the new way begins, 1-based.
        """
        if to == self.to:
            return self
        return LrRamp(self.at(step), to, step, self.doubling)

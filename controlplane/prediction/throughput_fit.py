"""All coefficients of a speed model together, with priors about what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from controlplane.prediction.array_types import FloatArray
from controlplane.prediction.speed_model import FIXED_SHARE, Sample, SpeedModel

HOP_SHARE: Final = 0.05  # of the cost of two slots that each further one adds, until seen
TINY: Final = 1e-3  # share of a step below which a coefficient does not begin
FAR_TALK: Final = 2.0  # times what it costs within a node, until seen
TALK_SHARE: Final = 0.1  # of a step, until seen
USUAL_OVERLAP: Final = 1.5  # g, until seen
LEAST_OVERLAP: Final = 1.0  # g of no overlap at all (Pollux eq. 11)
WIDTH: Final = 9.0  # of the range of g, which ends at 10 as in Pollux
LEAST_SHARE: Final = 0.01  # of that range, from its ends, where a search begins
MOST_LOGARITHM: Final = 60.0  # of a coefficient: exp(60) is far beyond any measurement
MOST_TRIES: Final = 100  # evaluations of a fit; some 15 are usual

# Priors, a row each: factors of the x of (a, b, c, d, far c, far d, g).
PRIORS: Final = np.array([
    [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # a over b: a is 0.3 of a step at the middle batch
    [0.0, 0.0, -1.0, 1.0, 0.0, 0.0, 0.0],  # d over c: a further slot adds a small share
    [0.0, 0.0, 0.0, 0.0, -1.0, 1.0, 0.0],  # the same across nodes
    [0.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0],  # talk across nodes costs twice that within one
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],  # computing and talking overlap by half
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # samples take most of a step
    [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],  # talk takes a tenth
])  # fmt: skip
TRUST: Final = np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05])  # roots of weights, in samples


def refined(samples: Sequence[Sample], before: SpeedModel | None = None) -> SpeedModel:
    """The model of the least squares of logarithms (Levenberg-Marquardt), without corrections.

    Pollux minimises the same error (section 4.1), without priors. All coefficients together: taken
    one after the other, a few per cent of computing at large batches end up in the network.

    Args:
        samples: of one family, some of them of several slots; all finite and above 0.
        before: where the search begins; None: at what is believed before anything was measured.
    """
    fitted = _Fitted(samples)
    begin = fitted.prior_mean if before is None else fitted.place_of(before)
    found = least_squares(
        fitted.residuals, begin, jac=fitted.jacobian, method="lm", max_nfev=MOST_TRIES
    )
    return fitted.model(found.x)


class _Fitted:
    """A fit in seven numbers x: logarithms of a, b, of c, d within a node, and of c, d across.

    The last one is the logit of g's place between 1 and 10: g stays there without an edge that
    would stop the search, also of the others.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        slots = np.array([s.slots for s in samples])
        nodes = np.array([s.nodes for s in samples])
        self._local = np.array([s.local_batch for s in samples])
        self._further = np.maximum(slots - 2, 0).astype(np.float64)
        self._several = slots > 1
        self._near = self._several & (nodes == 1)
        self._far = self._several & (nodes > 1)
        self._has_near, self._has_far = bool(self._near.any()), bool(self._far.any())
        self._seen = np.log([s.step_s for s in samples])
        self._weight = np.sqrt([s.weight for s in samples])
        middle = self._middle = float(np.exp(np.mean(self._seen)))
        batch = self._batch = float(np.exp(np.mean(np.log(self._local))))
        self._hoped = np.log([
            FIXED_SHARE / (1.0 - FIXED_SHARE) * batch, HOP_SHARE, HOP_SHARE, FAR_TALK,
            1.0, (1.0 - FIXED_SHARE) * middle / batch, TALK_SHARE * middle,
        ])  # fmt: skip
        self._hoped[4] = place_of(USUAL_OVERLAP)
        self.prior_mean: FloatArray = np.linalg.solve(PRIORS, self._hoped)

    def place_of(self, model: SpeedModel) -> FloatArray:
        """The x of a model, but nowhere too far down for a coefficient to grow again."""
        middle, batch = self._middle, self._batch
        a, b = (max(each, TINY * middle) for each in (model.compute[0], model.compute[1] * batch))
        near = model.near or model.far or (TALK_SHARE * middle, 0.0)
        far = model.far or (near[0] * FAR_TALK, 0.0)
        c, e = max(near[0], 0.01 * middle), max(far[0], 0.01 * middle)
        d, f = max(near[1], HOP_SHARE * c), max(far[1], HOP_SHARE * e)
        return np.append(np.log([a, b / batch, c, d, e, f]), place_of(model.overlap))

    def residuals(self, x: FloatArray) -> FloatArray:
        """What the model says over what was seen, in logarithms; then what priors are off by."""
        said = self._said(x)[0]
        off = TRUST * (PRIORS @ x - self._hoped)
        return np.append(self._weight * (said - self._seen), off)

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Derivatives of `residuals`, shape (samples + priors, 7)."""
        a, b, c, d, e, f, _ = _values(x)
        said, log_compute, log_talk, g = self._said(x)
        talks = np.exp(g * (log_talk - said))  # share of talking in the power mean; 0 on one slot
        of_compute = (1.0 - talks) * np.exp(-log_compute)
        log_talk = np.where(self._several, log_talk, 0.0)
        of_talk = talks * np.exp(-log_talk)
        of_g = (1.0 - talks) * log_compute + talks * log_talk - said
        columns = np.column_stack([
            of_compute * a,
            of_compute * b * self._local,
            of_talk * self._near * c,
            of_talk * self._near * d * self._further,
            of_talk * self._far * e,
            of_talk * self._far * f * self._further,
            of_g * _overlap_slope(g),
        ])  # fmt: skip
        return np.vstack([self._weight[:, None] * columns, TRUST[:, None] * PRIORS])

    def _said(self, x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, float]:
        """Logarithms of step, computing and talking, shape (S,); and g."""
        a, b, c, d, e, f, g = _values(x)
        talk = self._near * (c + d * self._further) + self._far * (e + f * self._further)
        log_compute = np.log(a + b * self._local)
        log_talk = np.full(len(talk), -np.inf)
        np.log(talk, out=log_talk, where=self._several)
        return np.logaddexp(g * log_compute, g * log_talk) / g, log_compute, log_talk, g

    def model(self, x: FloatArray) -> SpeedModel:
        """What `x` stands for.

        Where only one kind of network was seen, several nodes are believed to be no faster.
        """
        a, b, c, d, e, f, g = _values(x)
        near, far = (c, d), (e, f)
        if not self._has_far:
            far = (max(c, e), max(d, f))
        elif not self._has_near:
            near = (min(c, e), min(d, f))
        return SpeedModel(compute=(a, b), near=near, far=far, overlap=g, known=True)


def _values(x: FloatArray) -> list[float]:
    """A, b, c, d, far c, far d in seconds; g."""
    found: list[float] = np.exp(np.clip(x, -MOST_LOGARITHM, MOST_LOGARITHM)).tolist()
    found[6] = LEAST_OVERLAP + WIDTH * found[6] / (1.0 + found[6])
    return found


def place_of(overlap: float) -> float:
    """The x of a g; one at its limit begins a little inside, where it can still move.

    Args:
        overlap: g, 1 to 10.
    """
    share = (overlap - LEAST_OVERLAP) / WIDTH
    share = min(max(share, LEAST_SHARE), 1.0 - LEAST_SHARE)
    return float(np.log(share / (1.0 - share)))


def _overlap_slope(g: float) -> float:
    """Of g by its x."""
    return (g - LEAST_OVERLAP) * (LEAST_OVERLAP + WIDTH - g) / WIDTH / g

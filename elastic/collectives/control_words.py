"""Control words: numbers that are reduced together with the gradients, so that ranks agree.

The reduction of each step sums the words over the ranks, so all ranks learn the same facts in the
same step. When all ranks are ready for a new group, they agree on a later step and switch after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from elastic.training_errors import OutOfStepError

DIGEST_BYTES: Final = 4  # length of a checksum
DIGEST_WORDS: Final = 4 * DIGEST_BYTES  # half bytes and their squares: exact up to 74,000 ranks
FIXED_WORDS: Final = 4 + 2 * DIGEST_WORDS + 5
STEP_MODULUS: Final = 1024  # step numbers are sent modulo this, so that float sums are exact


@dataclass(frozen=True, slots=True)
class ControlWords:
    """Control words of one rank."""

    samples: int = 0
    ready: bool = False  # vote for the pending group
    seconds: float = 0.0  # duration of this rank's last step
    digest: bytes = bytes(DIGEST_BYTES)  # checksum of the tensors, in some steps
    rates: bytes = bytes(DIGEST_BYTES)  # checksum of hyperparameters and of the optimizers' steps
    step: int = 0  # step of this rank
    ends: bool = False  # this rank has finished the epoch and has no step
    skipped: bool = False  # the script skipped the batch
    items: float = 0.0  # items that the losses are averaged over; 0 if the script sets none
    held: int = 0  # samples that the batches hold; fewer than `samples` if some were left out

    def encode(self) -> list[float]:
        """Return the words as FIXED_WORDS - 1 numbers; the reduction puts the loss sum first."""
        return [
            float(self.samples),
            float(self.ready),
            self.seconds,
            *_digest_words(self.digest),
            *_digest_words(self.rates),
            float(self.step % STEP_MODULUS),
            float(self.ends),
            float(self.skipped),
            self.items,
            float(self.held),
        ]


@dataclass(frozen=True, slots=True)
class AgreedWords:
    """Sums and means of all ranks' control words; every rank knows them after the reduction."""

    loss_sum: float
    samples: int
    ready: int  # ranks that voted for the pending group
    seconds: float  # mean over ranks
    same: bool  # all checksums of tensors are equal
    same_rates: bool  # all checksums of hyperparameters are equal
    step: float  # mean over ranks, modulo STEP_MODULUS
    ends: int  # ranks that have finished the epoch
    skipped: int  # ranks with a script that skipped the batch
    items: float  # items that the losses are averaged over; 0 if the script sets none
    held: int  # samples that the batches hold
    used: tuple[bool, ...]  # per parameter: True if any rank has a gradient for it

    def check_in_step(self, ranks: int, step: int | None) -> None:
        """Check that all ranks reduced `step`, which is None if this rank has ended the epoch."""
        if self.ends not in {0, ranks} or (step is None) != (self.ends == ranks):
            raise OutOfStepError("some have ended the epoch, others take another batch")
        if step is not None and self.step != step % STEP_MODULUS:
            raise OutOfStepError(f"not all are in step {step}")

    def check_shares(self, total: int) -> None:
        """Check that the local batches of all ranks add up to `total` samples."""
        if self.samples != total:
            raise OutOfStepError(f"they took {self.samples} samples of a step of {total}")


def read_agreed_words(numbers: Sequence[float], ranks: int) -> AgreedWords:
    """Decode the reduced words, shape (FIXED_WORDS + parameters,). All ranks get the same bits."""
    rates, end = 4 + DIGEST_WORDS, 4 + 2 * DIGEST_WORDS
    step, ends, skipped, items, held = numbers[end:FIXED_WORDS]
    return AgreedWords(
        loss_sum=numbers[0],
        samples=round(numbers[1]),
        ready=round(numbers[2]),
        seconds=numbers[3] / ranks,
        same=_are_equal(numbers[4:rates], ranks),
        same_rates=_are_equal(numbers[rates:end], ranks),
        step=step / ranks,
        ends=round(ends),
        skipped=round(skipped),
        items=items,
        held=round(held),
        used=tuple(count > 0 for count in numbers[FIXED_WORDS:]),
    )


@lru_cache(maxsize=16)  # most steps have the checksums of the last one
def _digest_words(digest: bytes) -> tuple[float, ...]:
    """Return the half bytes of a checksum, followed by their squares."""
    parts = [float(half) for byte in digest for half in divmod(byte, 16)]
    return (*parts, *(part * part for part in parts))


def _are_equal(words: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks' checksums are equal, by the sums of their `_digest_words`."""
    middle = len(words) // 2
    pairs = zip(words[:middle], words[middle:], strict=True)
    return all(ranks * square == part * part for part, square in pairs)

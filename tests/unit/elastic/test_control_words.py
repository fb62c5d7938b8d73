"""Control words at the tail of the gradients."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.collectives.control_words import (
    DIGEST_BYTES,
    FIXED_WORDS,
    AgreedWords,
    ControlWords,
    read_agreed_words,
)
from elastic.state.portions import MIN_BYTES_A_STEP, transfer_steps

DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


def summed(
    tails: list[ControlWords], dtype: torch.dtype, used: list[list[bool]] | None = None
) -> AgreedWords:
    rows = [
        [0.5, *tail.encode(), *map(float, used[rank] if used else [])]
        for rank, tail in enumerate(tails)
    ]
    total = torch.zeros(len(rows[0]), dtype=dtype)
    for row in rows:
        total += torch.tensor(row, dtype=dtype)
    return read_agreed_words(total.tolist(), len(tails))


def test_all_ranks_read_the_same_from_the_sum() -> None:
    tails = [
        ControlWords(3, ready=True, seconds=1.0, step=2051, items=70.5, held=3),
        ControlWords(2, ready=False, seconds=3.0, step=2051, skipped=True, items=9.0, held=1),
        ControlWords(0, step=2051, ends=True),
    ]

    told = summed(tails, torch.float32, [[True, False, False], [True, False, True], [False] * 3])

    assert len(ControlWords().encode()) == FIXED_WORDS - 1
    assert told == AgreedWords(
        loss_sum=1.5, samples=5, ready=1, seconds=4.0 / 3, same=True, same_rates=True, step=3.0, ends=1, skipped=1,
        items=79.5, held=4, used=(True, False, True),
    )  # fmt: skip


@given(st.permutations([ControlWords(i, i % 2 == 0, i / 4, bytes([i] * 4)) for i in range(6)]))
def test_control_words_ignore_the_order_of_ranks(tails: list[ControlWords]) -> None:
    assert summed(tails, torch.float32) == summed(
        sorted(tails, key=lambda t: t.samples), torch.float32
    )


RANKS = st.integers(2, 64) | st.just(3000)


@given(DIGESTS, DIGESTS, RANKS)
def test_equal_checksums_agree(digest: bytes, rates: bytes, ranks: int) -> None:
    agreed = summed([ControlWords(digest=digest, rates=rates)] * ranks, torch.float32)

    assert (agreed.same, agreed.same_rates) == (True, True)


@given(DIGESTS, RANKS, st.data())
def test_one_different_bit_is_noticed(digest: bytes, ranks: int, data: st.DataObject) -> None:
    place, rank = data.draw(st.integers(0, DIGEST_BYTES - 1)), data.draw(st.integers(0, ranks - 1))
    other = bytearray(digest)
    other[place] ^= 1 << data.draw(st.integers(0, 7))
    digests = [bytes(other) if r == rank else digest for r in range(ranks)]

    tensors = summed([ControlWords(digest=d) for d in digests], torch.float32)
    rates = summed([ControlWords(rates=d) for d in digests], torch.float32)

    assert (tensors.same, tensors.same_rates) == (False, True)
    assert (rates.same, rates.same_rates) == (True, False)


@given(st.integers(0, 10**12), st.floats(0, 1000), st.floats(1e6, 1e12), st.integers(1, 500))
def test_a_transfer_takes_one_step_to_its_units(
    size: int, step_s: float, speed: float, units: int
) -> None:
    steps = transfer_steps(size, step_s, speed, units)

    assert 1 <= steps <= min(units, 64)
    if steps < min(units, 64):
        assert size <= steps * max(MIN_BYTES_A_STEP, 0.5 * step_s * speed)


def test_a_small_state_takes_one_step() -> None:
    assert transfer_steps(MIN_BYTES_A_STEP, 0.0, 400e6, 100) == 1
    assert transfer_steps(100 << 20, 0.1, 400e6, 100) == 6

"""An interpreter of a job says anything over its socket: who asked it hears so, others go on."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nodeagent.errors import StartError
from nodeagent.folders import FRAME
from nodeagent.zygotes import ZygoteConnection
from schemas.codec import encode
from schemas.wire.worker import Forked
from tests.support.sizes import examples

LIMIT_S = 60.0
FORKED = Forked(folder="honest", pid=7, started_ticks=9)


def framed(data: bytes) -> bytes:
    return FRAME.pack(len(data)) + data


async def answered(said: list[bytes], folder: str) -> Forked | None:
    """What becomes of a fork, asked of one who says this over a real socket; None: it failed."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(FRAME.size)
        for piece in said:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    with tempfile.TemporaryDirectory(prefix="ones-") as where:
        server = await asyncio.start_unix_server(speak, f"{where}/z")
        async with server:
            reader, writer = await asyncio.open_unix_connection(f"{where}/z")
            zygote = ZygoteConnection(reader, writer)
            try:
                return await asyncio.wait_for(zygote.fork(Path(folder)), LIMIT_S)
            except StartError:
                return None
            finally:
                await asyncio.wait_for(asyncio.shield(zygote._task), LIMIT_S)
                writer.close()


anything = st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(framed))


@given(st.lists(anything, max_size=6))
@example([b"\xff\xff\xff\xff", bytes(1000)])
@example([framed(encode(Forked(folder="other", pid=1, started_ticks=1)))])
@example([framed(encode(FORKED))[:5], framed(encode(FORKED))[5:]])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_zygote_says_a_fork_has_an_end_and_another_ones_is_answered(
    said: list[bytes],
) -> None:
    async def both() -> list[Forked | None]:
        return await asyncio.gather(
            answered(said, "hostile"), answered([framed(encode(FORKED))], "honest")
        )

    hostile, honest = asyncio.run(both())

    assert (hostile, honest) == (None, FORKED)

"""A controller on ports with two people, and a service whose job trains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.schemas_links import connected
from tests.support.service import House, LiveService, Person, served


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with served(tmp_path / "cluster") as made:
        yield made


@pytest.fixture
async def people(house: House) -> AsyncIterator[tuple[Person, Person]]:
    with ExitStack() as stack:
        made = [Person(house, house.keys[name]) for name in ("ann", "bob")]
        for person in made:
            stack.callback(person.close)
            await connected(person.requests)
            await connected(person.pages)
        yield made[0], made[1]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    """Job a trains, and all of that is durable."""
    made = LiveService(tmp_path)
    made.loop.begin("0")
    made.train()
    await made.loop.caught_up()
    yield made
    made.loop.close()

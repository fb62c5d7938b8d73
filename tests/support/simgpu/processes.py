"""Runs parts of tests in processes that have the simulated device, which the process of pytest has not."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch

from tests.support.simgpu.build import NoCompilerError, library
from tests.training.peers import Parent, Peers, RendezvousInfo, each, peers

DEVICE: Final = "tests.support.simgpu.device"
DOUBLE: Final = "tests.support.simgpu.nccl_double"
MODES: Final = ("ordinary", "worst")


def require_library() -> None:
    """Build the device unless it is built; skip the test where that cannot be done."""
    try:
        library()
    except NoCompilerError as error:
        pytest.skip(str(error))


def here(index: int = 0) -> torch.device:
    """A simulated device."""
    return torch.device("simgpu", index)


def row(value: float) -> torch.Tensor:
    """Four equal numbers on the device."""
    return torch.full((4,), value, device=here())


class DeviceProcess:
    """A process with the device, in which tests run one after another."""

    def __init__(self, process: Peers) -> None:
        self._process = process

    def run(self, test: Callable[..., Any]) -> None:
        """Run the body of `test` there; fails as it failed.

        Args:
            test: made by `on_device`.
        """
        self._process.tell(0, test)
        if failure := self._process.said(0):
            pytest.fail(failure, pytrace=False)


@contextlib.contextmanager
def device_process() -> Iterator[DeviceProcess]:
    """A process with the device, gone at the end."""
    require_library()
    with peers(_serve, 1) as made:
        yield DeviceProcess(made)


def on_device(body: Callable[..., None]) -> Callable[[DeviceProcess], None]:
    """Make `body` a test that runs in the process of the fixture `device`.

    Args:
        body: given the module `tests.support.simgpu.device` if it takes a parameter.
    """

    def test(device: DeviceProcess) -> None:
        device.run(test)

    test.__name__, test.__qualname__ = body.__name__, body.__qualname__
    test.__module__, test.__doc__ = body.__module__, body.__doc__
    test.body = body  # type: ignore[attr-defined]
    return test


@contextlib.contextmanager
def ranks_of(
    scene: Callable[..., Any], size: int, *arguments: Any, **environment: str
) -> Iterator[Peers]:
    """Run `scene` on each rank, given the module `nccl_double`, its `RendezvousInfo` and arguments."""
    require_library()
    with peers(_play, size, scene, arguments, environment) as made:
        yield made


def on_ranks(
    scene: Callable[..., Any], size: int, *arguments: Any, **environment: str
) -> list[Any]:
    """Return the results of `scene` on each rank; see `ranks_of`."""
    require_library()
    return each(_play, size, scene, arguments, environment)


def _play(
    meeting: RendezvousInfo,
    scene: Callable[..., Any],
    arguments: Sequence[Any],
    environment: dict[str, str],
) -> Any:
    os.environ.update(environment)
    return scene(importlib.import_module(DOUBLE), meeting, *arguments)


def _serve(_: RendezvousInfo) -> None:
    device = importlib.import_module(DEVICE)
    while True:
        test = Parent.says()
        try:
            test.body(*[device][: test.body.__code__.co_argcount])
        except BaseException as error:  # noqa: BLE001 - the test is to see it
            Parent.hears("".join(traceback.format_exception(error)))
        else:
            Parent.hears("")
        finally:
            device.set_late()

"""The emulated device, compiled once a run for each architecture that a test asks for."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import pytest

from emulated_cuda import HOPPER, Device, build, write_sources
from tests.cuda.planted import FAULTS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Devices before Hopper, which take a minute each to compile, are for make test-all."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        architecture = parameters.get("architecture")
        if isinstance(architecture, int) and architecture < HOPPER:
            item.add_marker("long")


@pytest.fixture(scope="session")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Device]:
    """``devices(architecture)``"""
    folder = tmp_path_factory.mktemp("cuda")
    write_sources(folder, FAULTS)
    return functools.cache(lambda architecture: Device(build(folder, architecture), architecture))


@pytest.fixture
def device(devices: Callable[[int], Device], request: pytest.FixtureRequest) -> Device:
    """The newest device, with an order of threads of the test's own."""
    device = devices(HOPPER)
    device.configure(seed=zlib.crc32(request.node.name.encode()))
    return device

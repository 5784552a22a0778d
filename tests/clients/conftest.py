"""One server with the built-in model for all clients: their tool loops need a model that speaks."""

from collections.abc import Iterator

import pytest

from tests.serve.running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server("--no-console") as running:
        yield running

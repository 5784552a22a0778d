"""Servers for all tests that only ask things; those that hurt one start their own."""

from collections.abc import Iterator

import openai
import pytest

from tests.serve.running_server import RunningServer, quick_model, running_server


@pytest.fixture(scope="session")
def quick_server() -> Iterator[RunningServer]:
    """What it says makes no sense, and takes a tenth of the time."""
    with running_server(quick_model()) as running:
        yield running


@pytest.fixture(scope="session")
def speaking_server() -> Iterator[RunningServer]:
    """With the whole built-in model."""
    with running_server() as running:
        yield running


@pytest.fixture
def server(request: pytest.FixtureRequest) -> RunningServer:
    """The quick one; for a test that is marked `speaking` the one whose answers make sense."""
    speaking = request.node.get_closest_marker("speaking") is not None
    running: RunningServer = request.getfixturevalue("speaking_server" if speaking else "quick_server")
    return running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()

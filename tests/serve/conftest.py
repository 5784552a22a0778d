"""One server for all tests that only ask it things; those that hurt it start their own."""

from collections.abc import Iterator

import openai
import pytest

from tests.serve.running_server import RunningServer, quick_model, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server(quick_model()) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()

"""Servers for all tests that only ask things; those that hurt one start their own."""

from collections.abc import Iterator

import openai
import pytest

from tests.serve.running_server import RunningServer, quick_model, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """What it says makes no sense: a file whose tests want some overrides this with `speaking_server`."""
    with running_server(quick_model()) as running:
        yield running


@pytest.fixture(scope="session")
def speaking_server() -> Iterator[RunningServer]:
    """With the whole built-in model."""
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()

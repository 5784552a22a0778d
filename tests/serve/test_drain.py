"""How a server ends: SIGTERM, Ctrl-C and worse, and starts that cannot succeed. It takes its engine along."""

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from tests.cli.conftest import ROOT, cumulo_process
from tests.serve.running_server import needs_built_in_model, quick_model, running_server, wait_for
from tests.serve.test_faults import LONG, SHORT, begin_stream, engine_is_gone

pytestmark = [needs_built_in_model, pytest.mark.long]
TRIES = (
    5  # with a new server: the answer has ended before the signal where this process had to wait for its turn
)


def test_sigterm_lets_the_running_finish_and_refuses_the_new() -> None:
    refusals = (_refusal_while_it_drains() for _ in range(TRIES))
    refusal = next((one for one in refusals if not isinstance(one, openai.APIConnectionError)), None)
    assert isinstance(refusal, openai.InternalServerError) and "shutting down" in str(refusal)
    assert refusal.status_code == 503 and "Retry-After" in refusal.response.headers


def _refusal_while_it_drains() -> openai.APIError:
    """What a new request hears; an APIConnectionError where the server has ended before."""
    with running_server(quick_model(), "--drain-timeout", "600") as server, ThreadPoolExecutor() as threads:
        client = server.client()
        stream, _ = begin_stream(client, LONG | {"max_tokens": 120})
        engine = server.engine_pid()
        ending = threads.submit(server.end)
        wait_for(lambda: server.process.poll() is not None or server.status("/ready") == 503, "the drain")
        with pytest.raises(openai.APIError) as caught:
            client.chat.completions.create(**SHORT)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert ending.result() == 0
        assert engine_is_gone(engine)
    return caught.value


def test_what_does_not_finish_in_time_is_told_so() -> None:
    heard = (_heard_when_time_is_up() for _ in range(TRIES))
    error = next((one for one in heard if one is not None), None)
    assert error is not None and "shutting down" in str(error)


def _heard_when_time_is_up() -> openai.APIError | None:
    """The error at the end of a stream; None where it was complete before."""
    with running_server(quick_model(), "--drain-timeout", "0.5") as server, ThreadPoolExecutor() as threads:
        stream, _ = begin_stream(server.client(), LONG)
        ending = threads.submit(server.end, signal.SIGINT)
        try:
            for _ in stream:
                pass
        except openai.APIError as error:
            return error
        finally:
            assert ending.result() == 0
    return None


def test_no_engine_outlives_its_server() -> None:
    with running_server(quick_model()) as server:
        engine = server.engine_pid()
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        wait_for(lambda: engine_is_gone(engine), "the end of the engine")


@pytest.mark.long
def test_a_server_told_to_stop_while_it_loads_stops() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cumulo.cli", "serve", "--port", "0", quick_model()],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        while "listening on" not in (line := process.stderr.readline()):
            assert line, "it ended before it listened"
        # From this line on connections are accepted and signals are heard.
        address = urlsplit(line.split()[2].rstrip(";"))
        assert address.hostname is not None
        socket.create_connection((address.hostname, address.port or 0), 30).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_start_that_cannot_succeed_says_why_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = cumulo_process("serve", "--port", port)
    assert refused.code == 2 and f"cannot listen on 127.0.0.1:{port}" in refused.err
    refused = cumulo_process("serve", "--port", "0", "no-such-model.gguf")
    assert refused.code == 2 and "there is no model at" in refused.err
    # Found out by the engine process, told by the server.
    refused = cumulo_process("serve", "--port", "0", "--max-context", "10000000")
    assert refused.code == 2 and "error: max_context=10000000 was asked for" in refused.err
    assert "Traceback" not in refused.err

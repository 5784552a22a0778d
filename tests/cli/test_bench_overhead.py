"""`cumulo bench overhead`: its arithmetic, and one real (small) run of server and engine side by side."""

import json
import statistics
from pathlib import Path

import pytest

from cumulo.base.reference_text import reference_text
from cumulo.bench.overhead import FirstToken, Round, RoundWork, ServerProcess, rows
from cumulo.bench.sides import FreshPieces
from cumulo.errors import CumuloError
from cumulo.load.prompts import uniform
from tests.cli.conftest import Run
from tests.serve.running_server import needs_built_in_model


def test_the_ratio_is_the_median_of_the_rounds_ratios_and_processor_time_is_per_token() -> None:
    seconds = ((10.0, 9.0), (40.0, 20.0), (10.0, 9.5))  # in round 2 something else slowed the server down
    streamed = [Round(1000, http_s, {"the API process": 0.1}) for http_s, _ in seconds]
    generated = [Round(1000, alone_s, {"LLM.generate": 2.0}) for _, alone_s in seconds]
    made = {row.name: row for row in rows(generated, streamed, [FirstToken(0.1015, 0.1)])}
    ratio = made["16 at once: streamed over HTTP / LLM.generate"]
    assert ratio.value == statistics.median([0.9, 0.5, 0.95]) and ratio.ok
    assert made["processor time per token: the API process"].value == pytest.approx(100.0)
    assert made["processor time per token: LLM.generate"].value == pytest.approx(2000.0)


def test_what_is_added_is_what_the_client_waited_less_what_the_engine_took() -> None:
    side = [Round(10, 1.0, {})]
    waits = [FirstToken(0.1 + added_s, 0.1) for added_s in (0.001, 0.0015, 0.0025, 0.003, 0.009)]
    made = {row.name: row for row in rows(side, side, waits)}
    added = made["first token: added to the engine's time, p50"]
    assert added.value == pytest.approx(2.5) and added.must == 2.0 and not added.ok


def test_no_text_is_used_twice_and_both_sides_get_the_same_work() -> None:
    pieces = FreshPieces(reference_text())
    first, second = (RoundWork.drawn(pieces, 1, 20, uniform(64, 128)) for _ in range(2))
    assert len({*first.texts, *second.texts}) == 40
    assert first.output_tokens == second.output_tokens and len(set(first.output_tokens)) > 5


@pytest.mark.long
def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(CumuloError, match=r"before it was ready(.|\n)*nowhere"),
        ServerProcess("serve", "/nowhere/model.gguf"),
    ):
        pass


@needs_built_in_model
@pytest.mark.thorough
def test_server_and_engine_are_measured_side_by_side(cumulo: Run, tmp_path: Path) -> None:
    report = tmp_path / "serving.json"
    ran = cumulo(
        "bench", "overhead", "--threads", "1", "--rounds", "1", "--requests", "16", "--output", "uniform:4-8",
        "--first-tokens", "3", "--json", str(report),
    )  # fmt: skip
    assert ran.code in (0, 1), ran.err  # a busy machine may miss the bounds
    found = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert 0 < found["16 at once: streamed over HTTP / LLM.generate"]["value"] < 3
    assert found["first token: added to the engine's time, p50"]["value"] > 0
    assert (
        found["first token: as the client sees it, p50"]["value"]
        > found["first token: added to the engine's time, p50"]["value"]
    )
    for process in ("the API process", "the engine's process", "the client", "LLM.generate"):
        assert found[f"processor time per token: {process}"]["value"] >= 0

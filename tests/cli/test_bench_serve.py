"""`cumulo bench serve` as users run it: against a real server, with every file it can write."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.load.toy_server import Behaviour, ToyServer


def test_a_closed_loop_reports_as_table_json_html_and_records(cumulo: Run, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("load.json", "load.html", "load.jsonl")}
    with ToyServer(lambda number, body: Behaviour(gap_s=0.002)) as server:
        ran = cumulo(
            "bench", "serve", server.url, "--concurrency", "3", "--requests", "9", "--input", "20",
            "--output", "uniform:3-6", "--slo", "ttft=30s,itl=10s", "--json", str(files["load.json"]),
            "--html", str(files["load.html"]), "--records", str(files["load.jsonl"]),
        )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "toy-model" in ran.out and "p99" in ran.out
    assert [line for line in ran.out.splitlines() if line.startswith("TTFT")]
    report = json.loads(files["load.json"].read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert set(report) == {"machine", "rows", "server", "levels"}
    assert rows["requests failed"] | {"note": ""} == rows["requests failed"] | {
        "value": 0, "unit": "of 9", "better": "lower", "must": 0, "ok": True, "note": "",
    }  # fmt: skip
    assert rows["met the SLO"]["value"] == 1.0 and rows["met the SLO"]["must"] == 0.95
    assert 0 < rows["TTFT p50"]["value"] <= rows["TTFT p99"]["value"]
    assert report["levels"][0]["requests"] == 9
    assert report["server"]["ignore_eos"] is True
    records = [json.loads(line) for line in files["load.jsonl"].read_text().splitlines()]
    assert len(records) == 9 + 3  # the warm-up's records are there, marked
    assert sum(record["measured"] for record in records) == 9
    assert all(3 <= record["output_tokens"] == len(record["chunk_times_s"]) <= 6 for record in records)
    assert files["load.html"].read_text().startswith("<!doctype html>")


@pytest.mark.long
def test_a_sweep_is_a_line_per_level_and_is_not_judged(cumulo: Run) -> None:
    with ToyServer(
        lambda number, body: Behaviour("500") if number > 0 and number % 2 else Behaviour()
    ) as server:
        ran = cumulo("bench", "serve", server.url, "--rate", "50,100", "--requests", "8", "--json", "-")
    assert ran.code == 0
    names = [row["name"] for row in json.loads(ran.out)["rows"]]
    assert "50/s: output throughput" in names and "100/s: requests failed" in names
    assert "50/s" in ran.err and "ITL" in ran.err


@pytest.mark.long
@pytest.mark.parametrize("slo", [[], ["--slo", "ttft=900ms,itl=900ms"]])
def test_a_line_per_level_fits_a_plain_terminal(cumulo: Run, slo: list[str]) -> None:
    behave = lambda number, body: Behaviour("500") if number == 5 else Behaviour(first_s=0.101, gap_s=0.011)  # noqa: E731
    with ToyServer(behave) as server:
        ran = cumulo(
            "bench", "serve", server.url, "--concurrency", "8,16", "--requests", "16", "--warmup", "0",
            "--output", "3", *slo,
        )  # fmt: skip
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines) and "…" not in ran.out
    assert [line for line in lines if line.startswith("16 at once")]


def test_a_search_that_can_find_nothing_says_so_at_once(cumulo: Run) -> None:
    with ToyServer(lambda number, body: Behaviour(first_s=0.05)) as server:
        ran = cumulo(
            "bench", "serve", server.url, "--rate", "2", "--slo", "ttft=1ms", "--find-rate", "--output", "3"
        )
        sent = len(server.measured)
    assert ran.code == 1
    told = re.search(r"a request alone does not keep the objective \(TTFT ([\d.]+) ms", ran.err)
    assert told is not None and float(told[1]) >= 50
    assert sent < 20


def test_a_search_does_not_begin_a_trial_it_has_no_time_for(cumulo: Run) -> None:
    with ToyServer() as server:
        ran = cumulo(
            "bench", "serve", server.url, "--rate", "1", "--slo", "ttft=9s", "--find-rate", "--search-time", "20s",
            "--output", "3",
        )  # fmt: skip
    assert ran.code == 1
    assert "at 1/s, would take 52 s and the search may take 20 s" in ran.err


@pytest.mark.long
def test_a_single_run_with_failures_or_a_missed_objective_is_exit_code_one(cumulo: Run) -> None:
    with ToyServer(lambda number, body: Behaviour("500") if number == 2 else Behaviour()) as server:
        assert cumulo("bench", "serve", server.url, "--requests", "4", "--warmup", "0").code == 1
    with ToyServer(lambda number, body: Behaviour(first_s=0.05)) as server:
        ran = cumulo("bench", "serve", server.url, "--requests", "4", "--slo", "ttft=1ms")
    assert ran.code == 1 and "misses must" in ran.out


def test_a_trace_is_replayed(cumulo: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n0,12,3\n100,20,4\n200,15,5\n")
    with ToyServer() as server:
        ran = cumulo(
            "bench", "serve", server.url, "--trace", str(trace), "--trace-unit", "ms", "--trace-speed", "2"
        )
        answers = [seen.body["max_tokens"] for seen in server.measured]
    assert ran.code == 0, ran.err
    assert sorted(answers) == [3, 4, 5]


def test_nobody_at_the_address_is_one_line_that_says_what_to_do(cumulo: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ran = cumulo("bench", "serve", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert ran.code == 2
    assert ran.err.startswith("error: no server answers at") and ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "cannot be combined"),
        (["--find-rate", "--rate", "1"], "add --slo"),
        (["--find-rate", "--slo", "ttft=1s"], "add --rate"),
        (["--rate", "1:5", "--requests", "3"], "add --duration"),
        (["--slo", "soon"], "--slo must look like"),
        (["--extra", "[]"], "must be a JSON object"),
        (["--extra", "{"], "not JSON"),
        (["--endpoint", "images"], "chat or completions"),
        (["--input", "zipf:3"], "--input"),
        (["--input", "normal:1,1e12,1"], "narrow its spread"),
        (["--trace", "/nowhere.csv"], "cannot read the trace"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_is_sent(
    cumulo: Run, arguments: list[str], message: str
) -> None:
    ran = cumulo("bench", "serve", "http://127.0.0.1:9", *arguments)
    assert ran.code == 2
    assert message in ran.err and "Traceback" not in ran.err


def test_it_explains_itself_with_an_example(cumulo: Run) -> None:
    ran = cumulo("bench", "serve", "--help")
    assert ran.code == 0 and "cumulo bench serve" in ran.out.split("Example:")[1]


def test_a_level_that_ends_with_its_warm_up_says_so(cumulo: Run) -> None:
    with ToyServer(lambda number, body: Behaviour(gap_s=0.002)) as server:
        ran = cumulo("bench", "serve", server.url, "--concurrency", "2", "--duration", "1ms", "--output", "2")
        assert ran.code == 2 and ran.out == ""
        assert "no request ended after the warm-up: use a longer --duration, or --warmup 0" in ran.err

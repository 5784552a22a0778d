"""`cumulo simulate serve` and `cumulo plan serve`, as a user types them."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from cumulo.cli.plan import serve as plan_serve
from cumulo.cli.simulation import serve as simulate
from cumulo.cli.simulation.autoscale import began_words
from cumulo.errors import CumuloError
from cumulo.fleet.simulate.autoscaled_fleet import ScaledRun
from tests.whole_command import app

FAST = ["--requests", "60", "--input", "200", "--output", "20"]


@pytest.fixture(scope="module")
def plan_app() -> typer.Typer:
    """The verb by itself, whatever else `cumulo plan` has."""
    made = typer.Typer(pretty_exceptions_enable=False)
    made.command("serve")(plan_serve.serve)
    made.command("other")(lambda: None)
    return made


def run(*words: str, of: typer.Typer = app) -> str:
    result = CliRunner().invoke(of, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def report_of(path: Path, *words: str, of: typer.Typer = app) -> dict[str, Any]:
    run(*words, "--json", str(path), of=of)
    return json.loads(path.read_text())


def test_a_simulation_reports_latencies_and_is_the_same_every_time(tmp_path: Path) -> None:
    words = ["simulate", "serve", "llama-3.1-8b", "--rate", "10,20", *FAST]
    first, second = (report_of(tmp_path / name, *words) for name in ("a.json", "b.json"))
    assert [trial["rate"] for trial in first["trials"]] == [10.0, 20.0]
    assert first["trials"] == second["trials"]
    rows = {row["name"]: row["value"] for row in first["rows"]}
    assert rows["TTFT p50"] < rows["TTFT p99"]
    assert rows["simulation speed"] > 1 and rows["output throughput"] > 0


def test_the_capacity_is_found_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "load.svg"
    words = [
        "simulate",
        "serve",
        "qwen3-8b",
        "--slo",
        "ttft=300ms,itl=40ms",
        "--find-capacity",
        "--svg",
        str(picture),
    ]
    rows = {row["name"]: row for row in report_of(tmp_path / "a.json", *words, *FAST)["rows"]}
    assert rows["highest rate within the SLO"]["value"] > 1 and rows["concurrent users"]["value"] > 30
    assert rows["TTFT p99"]["ok"] and rows["ITL p99"]["ok"]
    root = ElementTree.fromstring(picture.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 4


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    shared = {"prompt_tokens": 300, "output_tokens": 9, "prefix": "a", "prefix_tokens": 256}
    trace.write_text("".join(json.dumps({"arrival_s": 0.1 * index, **shared}) + "\n" for index in range(30)))
    found = report_of(tmp_path / "a.json", "simulate", "serve", "llama-3.1-8b", "--trace", str(trace))
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["request rate"] == pytest.approx(10.0)
    assert rows["prefix cache hit rate"] == pytest.approx(100 * 256 / 300 * 29 / 30, rel=1e-3)


def test_requests_that_all_come_at_once_have_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = json.dumps({"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 9}) + "\n"
    trace.write_text(10 * line)
    found = report_of(tmp_path / "a.json", "simulate", "serve", "llama-3.1-8b", "--trace", str(trace))
    assert found["trials"][0]["rate"] is None and found["trials"][0]["finished"] == 10
    with pytest.raises(CumuloError, match="arrive at the same time"):
        run("simulate", "serve", "llama-3.1-8b", "--trace", str(trace), "--rate", "5")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--budget", "0.001"],
            r"--budget 0.001 is less than the fewest replicas cost, which is \$3.79 per hour",
        ),
        (["--min", "2", "--budget", "5"], r"less than the fewest replicas cost, which is \$7.58 per hour"),
        (["--begin", "100", "--max", "4"], "--begin 100 is more than --max 4"),
        (["--svg", "/nowhere/a.svg"], "there is no folder /nowhere"),
        (["TRACE"], "a rehearsal needs traffic that changes over time: it has one request"),
    ],
)
def test_a_rehearsal_that_cannot_be_is_refused_before_it_runs(
    tmp_path: Path, words: list[str], said: str
) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text(json.dumps({"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 9}) + "\n")
    with pytest.raises(CumuloError, match=said):
        run("simulate", "autoscale", *(str(trace) if word == "TRACE" else word for word in words))


@pytest.mark.parametrize("split", [[], ["--split"]])
def test_autoscaling_is_rehearsed_with_the_slo_of_a_server(tmp_path: Path, split: list[str]) -> None:
    """As it stands after `cumulo serve --slo`."""
    words = ["--requests", "60", "--rate", "6", "--begin", "1", "--device", "l40s", "--rule", "forecast"]
    promise = ["--slo", "ttft=1s,itl=50ms"]
    found = report_of(tmp_path / "a.json", "simulate", "autoscale", *words, *promise, *split)
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["forecast: requests lost"] == 0
    assert 0 < rows["forecast: SLO attainment"] <= 100


def test_the_replicas_that_each_rule_began_with_are_told() -> None:
    """After --train that is what the rule had then, and not what the first minute of the rest needs."""
    runs = [ScaledRun("forecast", {"both": 2}), ScaledRun("hpa-queue=2", {"both": 1})]
    assert began_words(runs) == "forecast: 2 replicas, hpa-queue=2: 1 replica"
    assert began_words(runs[:1]) == "2 replicas"


def test_requests_of_a_trace_that_the_model_does_not_take_are_left_out_and_told_of(tmp_path: Path) -> None:
    trace, words = tmp_path / "trace.jsonl", ("simulate", "serve", "llama-3.1-8b", "--trace")
    lengths = [131_072, 500, 500, 131_068, 200_000, 500]
    line = '{{"arrival_s": {}, "prompt_tokens": {}, "output_tokens": 4}}\n'
    trace.write_text("".join(line.format(0.1 * n, length) for n, length in enumerate(lengths)))
    said = run(*words, str(trace), "--json", str(tmp_path / "a.json"))
    assert (
        "2 of the trace's 6 requests are left out: they are longer, with their answers, than the 131,072"
        in said
    )
    assert json.loads((tmp_path / "a.json").read_text())["trials"][0]["finished"] == 4
    trace.write_text("".join(line.format(0.1 * n, 200_000) for n in range(4)) + line.format(1, 5) * 3)
    with pytest.raises(CumuloError, match=r"4 of the trace's 7 requests are longer"):
        run(*words, str(trace))


def test_a_public_trace_with_block_hashes_is_replayed_too(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    line = {"input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace.write_text("".join(json.dumps({"timestamp": 1000 * n, **line}) + "\n" for n in range(20)))
    found = report_of(tmp_path / "a.json", "simulate", "serve", "llama-3.1-8b", "--trace", str(trace))
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["prefix cache hit rate"] == pytest.approx(
        100 * 1088 / 1100 * 19 / 20, rel=1e-3
    )  # whole blocks of 64
    assert rows["request rate"] == pytest.approx(1.0)  # its times are milliseconds
    packed = tmp_path / "mooncake.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    words = ["--replicas", "8", "--router", "prefix-aware", "--prefill", "2", "--decode", "6", "--tp", "2"]
    text = run("simulate", "serve", *words, str(packed))
    assert "8 × 2 × h200 (tp2, bfloat16)" in text and "2 prefill + 6 decode" in text


@pytest.mark.long
def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "answered" in run("simulate", "serve", str(tmp_path), *FAST)


@pytest.mark.long
def test_a_plan_names_the_cheapest_the_second_best_and_what_bounds_it(
    tmp_path: Path, plan_app: typer.Typer
) -> None:
    words = [
        "serve",
        "llama-3.1-8b",
        "--rate",
        "30",
        "--slo",
        "ttft=300ms,itl=40ms",
        "--devices",
        "h200,h100-sxm,l40s",
    ]
    found = report_of(tmp_path / "plan.json", *words, *FAST, of=plan_app)
    best, second = found["plans"]
    assert best["price_per_hour"] <= second["price_per_hour"]
    assert best["headroom"] >= -0.02 and best["gpus"] >= 1 and best["report"]["ttft_s"]["at_slo"] <= 0.3
    rows = {row["name"]: row for row in found["rows"]}
    assert "steps are bound by" in rows["headroom"]["note"] and "range" in rows["headroom"]["note"]
    assert rows["second best, total"]["value"] >= rows["price, total"]["value"]
    assert best["headroom_low"] <= best["headroom"] <= best["headroom_high"]
    promised = rows.get("promises kept")
    assert promised is None if best["prefill_replicas"] else promised["value"] >= 99
    page = tmp_path / "plan.html"
    text = run(*words, *FAST, "--together", "--report", str(page), of=plan_app)
    assert "evidence: " in text and "were simulated" in text and "How many users fit" in text
    assert page.read_text("utf-8").count("<svg") == 1
    assert "promises kept" in text and "of requests are refused" in " ".join(text.split())
    with pytest.raises(CumuloError, match=r"cannot write the plan to .*nowhere.plan.yaml: No such file"):
        run(*words, *FAST, "--together", "--out", str(tmp_path / "nowhere" / "plan.yaml"), of=plan_app)


@pytest.mark.long
def test_a_plan_can_be_hypothetical(tmp_path: Path, plan_app: typer.Typer) -> None:
    words = [
        "serve",
        "qwen3-235b-a22b",
        "--rate",
        "1",
        "--slo",
        "itl=60ms",
        "--devices",
        "h200",
        "--max-gpus",
        "2",
    ]
    with pytest.raises(CumuloError, match=r"with 2 GPUs; .* needs at least 4 GPUs"):
        run(*words, *FAST, of=plan_app)
    found = report_of(tmp_path / "plan.json", *words, *FAST, "--hypothetical", of=plan_app)
    assert found["plans"][0]["engine"] == "tensorrt-llm" and found["plans"][0]["gpus"] == 2


def test_a_plan_serves_longer_requests_than_its_sample_has(
    plan_app: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "llama-3.1-8b", "--rate", "5", "--slo", "itl=40ms", "--devices", "h200", "--together"]
    with pytest.raises(SystemExit, match="0"):
        plan_app([*words, *FAST])
    told = " ".join(capsys.readouterr().err.split())
    assert "start it with: cumulo serve MODEL" in told and "--max-context 256" in told


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "0"], "--rate must be a number above 0"),
        (["--rate", "-3"], "--rate must be a number above 0"),
        (["--input", "-5"], "at least 1"),
        (["--output", "0"], "at least 1"),
        (["--device", "h300"], "did you mean h"),
        (["--tp", "3"], "does not divide"),
        (["--tp", "0"], "does not divide"),
        (["--ep", "2", "--tp", "2"], "no experts"),
        (["--weights", "int3"], "weights must be one of bfloat16"),
        (["--device", "cpu"], "no measured products of bfloat16"),
        (["--find-capacity"], "add --slo"),
        (["--slo", "e2e=1s"], "can promise ttft and itl"),
        (["--slo", "ttft=0s"], "more than 0 s"),
        (["--requests", "1"], "2 or more"),
        (["--input", "200000"], "131,072"),
        (["--trace", "missing.jsonl"], "cannot read the trace"),
    ],
)
def test_nonsense_is_refused_with_what_would_work(words: list[str], says: str) -> None:
    with pytest.raises(CumuloError, match=says):
        run("simulate", "serve", "llama-3.1-8b", *words)


def test_a_model_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(CumuloError, match=r"take 756 GiB of 140 GiB each; tp 8 would fit"):
        run("simulate", "serve", "llama-3.1-405b")


@pytest.mark.long
def test_simulating_and_planning_import_no_torch() -> None:
    code = (
        "import sys; from cumulo.cli import simulation, plan; import cumulo.plan.serve.search;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.long
def test_every_option_of_the_engine_can_be_simulated() -> None:
    tiers = [
        "--kv-host-gib",
        "1",
        "--kv-disk",
        "/nowhere:1",
        "--disk-gb-s",
        "2",
        "--kv",
        "float8",
    ]
    text = run("simulate", "serve", "llama-3.1-8b", *FAST, *tiers)
    assert "float8 KV, --kv-host-gib 1, --kv-disk /nowhere:1" in " ".join(text.split())
    head = ["--acceptance", "0.6", "--speculate", "head"]
    text = run("simulate", "serve", "llama-3.1-8b", *FAST, *head)
    assert "--speculate head" in " ".join(text.split())
    with pytest.raises(CumuloError, match="more than 0 GB/s"):
        run("simulate", "serve", "llama-3.1-8b", *FAST, "--disk-gb-s", "0")


@pytest.mark.long
def test_a_plan_says_why_each_option_is_chosen_or_not(tmp_path: Path, plan_app: typer.Typer) -> None:
    asked = ["--kv-disk", "/var/cache/kv:9", "--acceptance", "0.6", "--speculate", "head"]
    words = ["serve", "qwen3-0.6b", "--rate", "1", "--slo", "ttft=2s,itl=100ms", "--devices", "l40s", "--together",
             "--weights", "bfloat16,float8", *asked]  # fmt: skip
    found = report_of(tmp_path / "plan.json", *words, *FAST, of=plan_app)
    told = {one["option"]: one for one in found["options"]}
    assert {"--kv-disk /var/cache/kv:9", "speculation", "no speculation"} <= told.keys()
    assert sum(told[name]["chosen"] for name in ("bfloat16 weights", "float8 weights")) == 1
    assert all(one["why"] for one in told.values())


def test_the_verbs_are_listed_with_an_example() -> None:
    assert "find-capacity" in run("simulate", "serve", "--help")
    assert "cumulo simulate serve" in simulate.EXAMPLE and "cumulo plan serve" in plan_serve.EXAMPLE


def test_routing_policies_are_compared_on_the_same_traffic(tmp_path: Path) -> None:
    words = ["simulate", "serve", "llama-3.1-8b", "--replicas", "3", "--rate", "20", *FAST]
    words += ["--shared-prefix", "512", "--prefixes", "6"]
    found = report_of(tmp_path / "fleet.json", *words, "--router", "round-robin,prefix-aware")
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["prefix-aware: cached prompt tokens"] > rows["round-robin: cached prompt tokens"] > 0
    assert "prefix-aware" in run(*words)
    with pytest.raises(CumuloError, match="there is no router 'nearest'"):
        run(*words, "--router", "nearest")

"""What every kind of answer of `cumulo plan` owes its reader: units, three digits at most, a range and a reason."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cumulo.cli.shared.terminal import out
from tests.plan.printed import too_long, without_unit
from tests.whole_command import app

_TRAIN = ("plan", "train")
_SMALL = ("--gpus", "16", "--batch", "64")
_ANSWERS = {
    "mixture": (*_TRAIN, "qwen3-30b-a3b", *_SMALL, "--tokens", "1e12", "--phases"),
    "lora": (*_TRAIN, "llama-3.1-8b", "--gpus", "1", "--device", "rtx-4090", "--batch", "8", "--sequence", "2048",
             "--lora-rank", "16", "--frozen-bits", "4"),
    "pipeline": (*_TRAIN, "llama-3.1-70b", *_SMALL, "--software", "nemo-2025", "--fixed", "tp=4,pp=4,zero=1",
                 "--phases", "--tokens", "1e11"),
    "offloaded": (*_TRAIN, "llama-3.1-8b", "--gpus", "8", "--device", "l40s", "--batch", "32",
                  "--offload-optimizer"),
    "published": (*_TRAIN, "deepseek-v3", "--gpus", "2048", "--device", "h800", "--like", "deepseek-v3"),
    "cpu": (*_TRAIN, "qwen3-0.6b", "--gpus", "2", "--device", "cpu", "--batch", "8", "--sequence", "1024"),
    "serve": ("plan", "serve", "llama-3.1-8b", "--rate", "5", "--devices", "h100-sxm,l40s", "--slo",
              "ttft=1s,itl=50ms", "--requests", "200"),
    "serve a mixture": ("plan", "serve", "qwen3-30b-a3b", "--rate", "2", "--devices", "h200", "--slo",
                        "ttft=2s,itl=50ms", "--requests", "100"),
    "cluster": ("plan", "cluster", "llama-3.1-8b", "--gpus", "512", "--tokens", "1e12", "--batch", "960",
                "--fixed", "dp=480,zero=1"),
}  # fmt: skip
_REFUSED = {
    "too large": (*_TRAIN, "deepseek-v3", "--gpus", "8", "--device", "rtx-4090"),
    "too late": (*_TRAIN, "llama-3.1-8b", *_SMALL, "--tokens", "15e12", "--deadline-days", "10"),
    "too expensive": (*_TRAIN, "llama-3.1-8b", *_SMALL, "--tokens", "15e12", "--budget", "1000"),
    "not divisible": (*_TRAIN, "llama-3.1-8b", "--gpus", "13", "--batch", "17"),
    "too slow to serve": ("plan", "serve", "llama-3.1-70b", "--rate", "5", "--devices", "h100-sxm", "--slo",
                          "ttft=20ms,itl=2ms"),
    "a layout too large": ("plan", "cluster", "llama-3.1-70b", "--gpus", "512", "--fixed", "dp=480"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are not folded, also where the console was made before this test."""
    monkeypatch.setattr(out, "_width", 300)


@pytest.mark.long
@pytest.mark.parametrize("words", _ANSWERS.values(), ids=_ANSWERS)
def test_an_answer_has_units_three_digits_a_range_and_a_reason(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "answer.json"
    done = CliRunner().invoke(app, [*words, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert not too_long(done.output)
    assert not without_unit(done.output)
    assert re.search(r"\brange\b|90% interval", done.output)
    assert re.search(r"^why\b", done.output, re.MULTILINE | re.IGNORECASE)
    rows = json.loads(file.read_text())["rows"]
    assert not [row["name"] for row in rows if isinstance(row["value"], int | float) and not row["unit"]]


@pytest.fixture(scope="module")
def run() -> str:
    """What the planner says of one run."""
    words = (*_TRAIN, "llama-3.1-8b", *_SMALL, "--tokens", "1e11", "--fixed", "zero=1", "--no-why")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(out, "_width", 300)
        return CliRunner().invoke(app, list(words)).output


@pytest.mark.parametrize("name", ["step time", "throughput", "throughput per GPU", "MFU", "HFU", "memory per GPU",
                                  "run time", "energy", "price"])  # fmt: skip
def test_every_prediction_of_a_run_has_a_90_percent_interval_around_it(name: str, run: str) -> None:
    line = next(line for line in run.splitlines() if re.match(rf" {name}  ", line))
    number = r"([\d,.]+)"
    found = re.search(rf"{name} +{number} .*90% interval: {number} \S+ to {number} ", line)
    assert found, line
    value, low, high = (float(part.replace(",", "")) for part in found.groups())
    assert low < value < high


def test_an_answer_begins_with_five_lines_that_say_what_the_details_say(run: str) -> None:
    short, details = run.split("Details")
    lines = dict(re.findall(r"^(use|speed|price|how sure|limit) +(.+?) *$", short, re.MULTILINE))
    assert list(lines) == ["use", "speed", "price", "how sure", "limit"]
    for name, line in (("run time", "speed"), ("step time", "speed"), ("price", "price")):
        found = re.search(rf"^ {name} +([\d.,]+) ", details, re.MULTILINE)
        assert found and found[1] in lines[line]
    assert lines["use"].split(",")[0] in details and lines["limit"].split(" (")[0] in details
    assert "of 989 TFLOP/s, the peak in bfloat16" in details


def test_a_plan_whose_range_reaches_beyond_the_budget_says_so() -> None:
    words = (*_TRAIN, "llama-3.1-8b", *_SMALL, "--tokens", "1e11", "--fixed", "zero=1", "--no-why")
    price = next(row for row in _json(words)["rows"] if row["name"] == "price")["value"]
    for budget, said in ((1.01 * price, True), (3 * price, False)):
        assert ("not at its end" in CliRunner().invoke(app, [*words, "--budget", str(budget)]).output) == said


def _json(words: tuple[str, ...]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(CliRunner().invoke(app, [*words, "--json", "-"]).stdout)
    return report


@pytest.mark.long
@pytest.mark.parametrize("words", _REFUSED.values(), ids=_REFUSED)
def test_a_refusal_has_units_three_digits_and_what_to_change(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words))
    told = done.output or str(done.exception)
    assert done.exit_code != 0
    assert not too_long(told)
    assert not without_unit(told)
    assert re.search(
        r"would|use|can be shared|can\b|raise|lower|allow|loosen|take a|omit|add --|looser", told
    ), told


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("plan", "validate", "--held-out", "--worst", "5"), id="training"),
        pytest.param(("plan", "validate", "serving", "--worst", "5"), id="serving"),
    ],
)
def test_validation_prints_units_and_three_digits(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    assert not too_long(done.output)
    assert not without_unit(done.output)
    assert re.search(
        r"\+ is predicted too (slow, - too fast|fast, - too slow)", " ".join(done.output.split())
    )


def test_the_html_report_of_a_cluster_has_units_ranges_and_three_digits(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    done = CliRunner().invoke(app, [*_ANSWERS["cluster"], "--report", str(file)])
    assert done.exit_code == 0, done.output
    page = re.sub(r"<style.*?</style>|<script.*?</script>", "", file.read_text("utf-8"), flags=re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "\n", page))
    assert not too_long(text)
    assert "90% range" in text and "Why:" in text


ONE_H100 = ("plan", "serve", "llama-3.1-8b", "--devices", "h100-sxm", "--slo", "ttft=1s", "--requests", "60",
            "--weights", "bfloat16", "--together")  # fmt: skip


def test_a_plan_of_servers_says_first_what_it_was_made_for(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    told = CliRunner().invoke(app, [*ONE_H100, "--users", "60", "--think", "30s", "--out", str(plan)]).output
    assert "60 users who each ask again 30 s after an answer ask at most 2 requests/s" in told
    assert "prompts of 512 tokens and answers of 128 on average, the defaults: --input" in told
    context = re.search(r"max_context: (\d+)", plan.read_text())
    assert context and f"contexts of up to {int(context[1]):,} tokens" in told
    assert told.index("Planned for") < told.index("price, total")
    short = re.search(
        r"^use +1 GPU: 1 replica of h100-sxm .*^speed +TTFT p99 .*; 2 requests/s.*"
        r"^price +2.99 USD/h, 2,150 USD per 30 days.*^how sure .*^limit .*^Details",
        told,
        re.MULTILINE | re.DOTALL,
    )
    assert short and "hypothetical" not in told
    room = re.search(r"KV cache usage, peak.*, of (\d+),000 tokens per replica", " ".join(told.split()))
    assert room and 400 < int(room[1]) < 524  # 128 KiB each, in 64 GiB beside the weights


def test_a_plan_for_devices_that_cumulo_does_not_run_on_says_so() -> None:
    words = [*ONE_H100[:3], "--devices", "mi300x", *ONE_H100[5:], "--rate", "2", "--hypothetical"]
    told = CliRunner().invoke(app, words).output
    assert "cannot run it: the kernels are for NVIDIA's GPUs" in told and "start it with" not in told


@pytest.mark.long
def test_gpt_oss_fits_one_h100_as_it_is_published_and_a_refusal_names_the_option_for_it() -> None:
    asked = (*ONE_H100[:2], "gpt-oss-120b", *ONE_H100[3:5], "--max-gpus", "1", "--slo", "ttft=1s,itl=80ms",
             "--users", "50", "--requests", "60")  # fmt: skip
    assert "add --hypothetical" in str(CliRunner().invoke(app, [*asked]).exception)
    told = CliRunner().invoke(app, [*asked, "--hypothetical"]).output
    assert re.search(r"^use +1 GPU: 1 replica of h100-sxm \(mxfp4, tensorrt-llm\)", told, re.MULTILINE)
    assert "`cumulo serve` cannot run it" in told


@pytest.mark.parametrize("rates", [(), ("--rate", "1", "--users", "2"), ("--users", "0")])
def test_either_a_rate_or_users_are_asked_for(rates: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*ONE_H100, *rates])
    assert done.exit_code != 0 and "--users" in str(done.exception)


@pytest.mark.long
def test_a_refusal_names_what_would_fit_on_the_same_gpus() -> None:
    asked = (*_TRAIN, "llama-3.1-70b", "--gpus", "8", "--batch", "64", "--no-why")
    refused = str(CliRunner().invoke(app, [*asked]).exception)
    options = re.findall(r"(--[a-z-]+(?: \d+)?)(?:, which trains adapters only)? \([\d.]+ GiB\)", refused)
    assert options == ["--offload-optimizer", "--lora-rank 16"]
    for option in options:
        assert CliRunner().invoke(app, [*asked, *option.split()]).exit_code == 0


def test_the_catalogue_is_listed(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["plan", "catalog"]).output
    assert re.search(
        r"llama-3\.1-8b +8\.03 billion +128 KiB", told
    )  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert re.search(r"deepseek-v3 +671 billion +68\.6 KiB", told)  # (512 + 64) x 61 layers x 2 bytes
    assert re.search(r"h100-sxm +79\.1 GiB +3\.35 TB/s +989 TFLOP/s", told) and "rail-infiniband" in told
    file = tmp_path / "models.json"
    assert CliRunner().invoke(app, ["plan", "catalog", "models", "--json", str(file)]).exit_code == 0
    (row,) = [one for one in json.loads(file.read_text())["rows"] if one["name"] == "model llama-3.1-8b"]
    assert row["KV per token"] == 131072 and row["context"] == "131,072"
    assert "devices" in str(CliRunner().invoke(app, ["plan", "catalog", "cars"]).exception)


@pytest.mark.long
def test_why_walks_from_one_plan_to_another_and_ends_where_it_does(tmp_path: Path) -> None:
    first = "train llama-3.1-8b --gpus 8 --batch 64 --fixed zero=1,dp=8 --tokens 1e10"
    second = "train llama-3.1-8b --gpus 16 --batch 64 --fixed zero=1 --tokens 1e10 --dtype float8"
    file, alone = tmp_path / "why.json", tmp_path / "alone.json"
    done = CliRunner().invoke(app, ["plan", "why", first, second, "--json", str(file)])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows[1:]] == ["--gpus 16", "--fixed zero=1", "--dtype float8"]
    assert "refused" in str(rows[1]["value"])  # sixteen GPUs, and a layout of eight
    assert CliRunner().invoke(app, ["plan", *second.split(), "--json", str(alone)]).exit_code == 0
    price = next(row["value"] for row in json.loads(alone.read_text())["rows"] if row["name"] == "price")
    assert rows[-1]["value"] == pytest.approx(price)
    assert re.search(r"run time +step time +change +plan", done.output)
    assert re.search(r"matrix products -[\d.]+ m?s", rows[-1]["note"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fly", "train llama-3.1-8b"), "compares plans of train, serve and cluster"),
        (("train llama-3.1-8b --gpuz 8", "train llama-3.1-8b"), "gpuz"),
        (("train 'llama", "train llama-3.1-8b"), "quotation"),
    ],
)
def test_why_refuses_what_is_no_plan(words: tuple[str, str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "why", *words])
    assert done.exit_code and said in done.output + str(done.exception)

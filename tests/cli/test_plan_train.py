"""`cumulo plan train` as a user runs it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cumulo.spec.catalog import model
from cumulo.spec.counting import parameter_count
from cumulo.spec.layout import Layout
from cumulo.train.config import load_config
from cumulo.train.new_spec import new_spec
from tests.cli.conftest import ROOT, Run

SMALL = ("plan", "train", "qwen3-0.6b", "--gpus", "8", "--batch", "64", "--sequence", "2048")


def test_a_plan_is_ranked_explained_and_costed(cumulo: Run) -> None:
    ran = cumulo(*SMALL, "--tokens", "1e10", "--json", "-")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    figures = {row["name"]: row["value"] for row in report["rows"]}
    best, *others = report["plans"]
    assert best["step_s"] == figures["step"] <= min(plan["step_s"] for plan in others)
    assert figures["throughput"] == pytest.approx(64 * 2048 / best["step_s"])
    assert sum(best["breakdown_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory_bytes"].values()) / 2**30 == pytest.approx(figures["memory"])
    assert figures["run"] == pytest.approx(1e10 / figures["throughput"] / 86400)
    assert figures["price"] == pytest.approx(figures["run"] * 24 * 8 * 2.99)
    assert best["interval_s"][0] < best["step_s"] < best["interval_s"][1]
    assert {"twice the network", "twice the memory"} <= {change["what"] for change in report["changes"]}


def test_the_words_on_the_screen_say_what_bounds_the_step_and_what_comes_second(cumulo: Run) -> None:
    ran = cumulo(*SMALL)
    assert ran.code == 0, ran.err
    for words in (
        "Memory of a GPU",
        "The step",
        "Best of each mesh",
        "bounded by",
        "slower",
        "plans in the space",
    ):
        assert words in ran.out


def test_a_given_layout_is_timed_and_not_changed(cumulo: Run) -> None:
    ran = cumulo(*SMALL, "--fixed", "tp=2,pp=2,zero=1,schedule=zb-v,sp=true,micro_batch=2", "--json", "-")
    (plan,) = json.loads(ran.out)["plans"]
    assert plan["layout"] == {
        "dp": 2, "tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True, "schedule": "zb-v",
    }  # fmt: skip
    assert plan["micro_batches"] == 16
    assert set(plan["bytes_sent"]) == {"tp", "pp", "dp"}


def test_a_plan_file_is_a_configuration_that_the_trainer_takes(cumulo: Run, tmp_path: Path) -> None:
    path, report = tmp_path / "plan.yaml", tmp_path / "plan.json"
    ran = cumulo(*SMALL, "--tokens", "1e9", "--out", str(path), "--json", str(report), "--no-why")
    assert ran.code == 0, ran.err
    config = load_config(path)
    best = json.loads(report.read_text())["plans"][0]
    assert config.layout == Layout(**best["layout"])
    assert (config.micro_batch, config.batch_sequences) == (best["micro_batch"], 64)
    assert config.steps == round(1e9 / (64 * 2048))
    spec = new_spec(config, config.data.tokenizer.vocab_size, ())
    assert parameter_count(spec) == pytest.approx(parameter_count(model("qwen3-0.6b")), rel=1e-3)
    assert path.read_text().startswith("# cumulo plan train qwen3-0.6b --gpus 8 --device h100-sxm")


def test_the_timeline_of_a_plan_is_drawn(cumulo: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    ran = cumulo(*SMALL, "--fixed", "pp=4,dp=2", "--no-why", "--timeline", str(path))
    assert ran.code == 0, ran.err
    picture = ElementTree.parse(path).getroot()
    assert picture.tag.endswith("svg") and len(list(picture.iter())) > 4 * 2 * 8


def test_the_example_catalogue_is_planned_for(cumulo: Run) -> None:
    machines = (
        "--node",
        "workshop",
        "--fabric",
        "office",
        "--catalog",
        str(ROOT / "examples/plan-cluster.yaml"),
    )
    ran = cumulo(*SMALL, *machines, "--no-why")
    assert ran.code == 0, ran.err
    assert "8 × l40s (2 × workshop, office)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("llama-3.1-8b", "--gpus", "0"), "needs 1 or more GPUs, got 0; a dgx-h100 has 8"),
        (("llama-3.1-8b", "--gpus", "9"), "8 or 16 would be"),
        (
            ("llama-3.1-8b", "--gpus", "8", "--fixed", "tp=3"),
            "tp 3 cannot share 32 attention heads evenly; tp 2 can",
        ),
        (("llama-3.1-8b", "--gpus", "8", "--fixed", "tp=8,dp=2"), "layout of 16 GPUs, and there are 8"),
        (("llama-3.1-8b", "--gpus", "8", "--fixed", "pp=3"), "does not divide 8 GPUs; 2 would"),
        (("llama-3.1-8b", "--gpus", "8", "--fixed", "micro_bach=3"), "did you mean 'micro_batch'"),
        (("llama-3.1-8b", "--gpus", "8", "--fixed", "tp"), "takes name=value"),
        (("llama-3.1-8b", "--gpus", "8", "--batch", "-4"), "batch must be 1 or more, got -4"),
        (("llama-3.1-8b", "--gpus", "8", "--memory-gib", "-1"), "--memory-gib must be more than 0"),
        (("llama-3.1-8b", "--gpus", "8", "--dtype", "float7"), "--dtype is bfloat16"),
        (("llama-3.1-8b", "--gpus", "8", "--budget", "5"), "add --tokens"),
        (
            ("llama-3.1-8b", "--gpus", "8", "--tokens", "1e9", "--budget", "-5"),
            "--budget must be more than 0",
        ),
        (("gpt-1t", "--gpus", "8", "--batch", "8"), "no layout fits"),
        (("gpt3-125m", "--gpus", "8", "--no-why", "--out", "x.yaml"), "cannot be run by `cumulo train`"),
        (("llama-3.1-9b", "--gpus", "8"), "did you mean llama-3.1-8b"),
    ],
)
def test_what_makes_no_sense_gets_the_reason_and_what_would(
    cumulo: Run, arguments: tuple[str, ...], reason: str
) -> None:
    ran = cumulo("plan", "train", *arguments)
    assert ran.code == 2
    assert reason in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_model_that_does_not_fit_is_told_how_many_gpus_would_hold_it(cumulo: Run) -> None:
    ran = cumulo("plan", "train", "llama-3.1-70b", "--gpus", "8", "--device", "a100-40gb", "--batch", "64")
    assert ran.code == 2 and "of these GPUs would hold it" in ran.err
    enough = ran.err.split(" of these GPUs")[0].split()[-1].replace(",", "")
    fits = cumulo(
        "plan", "train", "llama-3.1-70b", "--gpus", enough, "--device", "a100-40gb", "--batch", "64", "--no-why"
    )  # fmt: skip
    assert fits.code == 0, fits.err


def test_a_missed_deadline_names_a_cluster_that_keeps_it(cumulo: Run) -> None:
    limits = ("--tokens", "1e12", "--deadline-days", "20", "--no-why")
    ran = cumulo(*SMALL, *limits)
    assert ran.code == 2
    enough = ran.err.split(" GPUs would take")[0].split()[-1]
    assert cumulo(*SMALL[:4], enough, *SMALL[5:], *limits).code == 0
    assert "leave --fixed out" in cumulo(*SMALL, *limits, "--fixed", "dp=8").err


@pytest.mark.parametrize("arguments", [("plan", "--help"), SMALL])
def test_nothing_on_the_way_to_a_plan_imports_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from cumulo.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr

"""The plan of a whole cluster, its report and its command: cumulo/plan/cluster/plan.py, cli/plan_cluster.py."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import typer
from typer.testing import CliRunner

from cumulo.cli.plan.cluster import cluster as command
from cumulo.errors import ConfigError
from cumulo.plan.cluster.checkpoints import Recovery, best_job_gpus, ettr
from cumulo.plan.cluster.goal import ClusterGoal, assumptions, fixed_job, job_sizes
from cumulo.plan.cluster.plan import plan_cluster
from cumulo.plan.cluster.report import report
from cumulo.spec import catalog

FIXED = "tp=8,pp=16,dp=128,zero=2"  # as Llama 3 was trained


def a_goal(gpus=16640, fixed=FIXED, **changes):
    goal = ClusterGoal(
        "llama-3.1-405b",
        catalog.model("llama-3.1-405b"),
        catalog.cluster(gpus, "h100-sxm"),
        global_batch=2048,
        sequence_length=8192,
        tokens=15.6e12,
        **changes,
    )
    return replace(goal, fixed=fixed_job(fixed, goal)) if fixed else goal


@pytest.fixture(scope="module")
def plan():
    return plan_cluster(a_goal())


def test_the_worked_example_of_the_documentation(plan):
    """16,384 H100 for Llama 3.1 405B, as in docs/plan-cluster.md."""
    sheet = plan.sheet
    assert sheet["job_nodes"] == 2048
    assert sheet["mttf_h"] == pytest.approx(24 / (2048 * 3.79e-3))  # 3.09 h: as Llama 3 reports
    assert sheet["mttf_h"] == pytest.approx(54 * 24 / 419, rel=0.001)
    assert sheet["checkpoint_bytes"] == pytest.approx(12 * 405.85e9, rel=1e-4)
    assert sheet["write_s"] == pytest.approx(2.44, abs=0.01)
    assert sheet["interval_written_s"] == pytest.approx(231, abs=1)
    assert sheet["in_repair"] == pytest.approx(2080 * 3.79e-3 * 0.69 * 3)
    assert sheet["spare_nodes"] == 26


def test_formula_and_simulation_agree(plan):
    assert plan.sheet["ettr_simulated"] == pytest.approx(plan.sheet["ettr_formula"], abs=0.01)
    for tier in plan.checkpoints:
        for point in plan.sweeps[tier.key]:
            assert point.simulated.ettr == pytest.approx(point.by_formula, abs=0.02)
    best = max(point.by_formula for point in plan.sweeps["written"])
    assert plan.sheet["ettr_written"] == pytest.approx(best)


def test_every_figure_can_be_worked_out_again_from_what_is_shown(plan):
    for figure in plan.sheet.figures.values():
        assert figure.source or figure.formula, figure.name
        if figure.formula:
            again = type(plan.sheet)()
            for name in figure.inputs:
                again.given(name, plan.sheet[name], "", "", "test")
            assert again.work_out("again", figure.formula, "", "") == figure.value


def test_money_and_energy_follow_from_the_goodput(plan):
    sheet = plan.sheet
    hours = sheet["days"] * 24
    charged = 8 * (2048 + 26 * 2048 / 2080)  # the job's nodes, and its share of the spares
    assert sheet["cost_run"] == pytest.approx(charged * 2.99 * hours)
    assert sheet["cost_run_low"] < sheet["cost_run"] < sheet["cost_run_high"]
    assert sheet["energy_mwh"] * 15.6 == pytest.approx(sheet["facility_w"] * charged / 16640 * hours / 1e6)
    assert sheet["goodput_tok_s"] < sheet["training_tok_s"]


def test_thinner_fabrics_need_fewer_switches_and_slow_the_same_job_down(plan):
    sheet = plan.sheet
    assert sheet["rail_1_slower"] == pytest.approx(0)
    assert sheet["rail_1_switches"] == sheet["switches"]
    assert len(plan.fabrics) == 6
    for kind in ("rail", "fat_tree"):
        steps = [sheet[f"{kind}_{ratio}_step_s"] for ratio in (1, 2, 4)]
        switches = [sheet[f"{kind}_{ratio}_switches"] for ratio in (1, 2, 4)]
        assert steps == sorted(steps)
        assert switches == sorted(switches, reverse=True)


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.anchors, self.targets, self.open, self.hints = set(), set(), [], 0

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if "id" in named:
            self.anchors.add(named["id"])
        if tag == "a":
            self.targets.add(named["href"].removeprefix("#"))
            self.hints += " = " in named["title"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_number_of_the_report_leads_to_its_formula(plan):
    page = report(plan)
    links = _Links()
    links.feed(page)
    assert not links.open
    assert links.targets <= links.anchors
    assert set(plan.sheet.figures) <= links.anchors
    assert links.hints > 100
    assert page.count("<svg") == 1 and page.count('role="img"') == 5
    assert not re.search(r"\b(nan|inf)\b", page)


def test_a_search_leaves_the_spares_out_of_the_job():
    plan = plan_cluster(
        ClusterGoal(
            "qwen3-1.7b", catalog.model("qwen3-1.7b"), catalog.cluster(40, "h100-sxm"), 64, 4096, 1e12
        )
    )
    spare_gpus = plan.sheet["spare_nodes"] * 8
    assert spare_gpus > 0
    assert plan.training.job.layout.world + spare_gpus <= 40
    assert plan.training.job.layout.world >= 16


def test_promising_sizes_divide_the_batch_and_fill_whole_nodes():
    goal = a_goal(100_000, fixed="")
    sizes = job_sizes(replace(goal, global_batch=6144), 98_900, 18 * 405e9, 5)
    assert sizes[0] == 98_304
    assert all(size % 8 == 0 and size <= 98_900 for size in sizes)


@pytest.mark.long
def test_more_failures_cost_goodput(plan):
    often = assumptions({"failures": 20.0})
    assert plan_cluster(a_goal(assumptions=often)).sheet["ettr_simulated"] < plan.sheet["ettr_simulated"]


def run(*arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_a_report_and_json(tmp_path):
    page, figures = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ("--batch", "512", "--fixed", "tp=8,pp=4,dp=16", "--failures", "6.5", "--price", "2.5")
    result = run("llama-3.1-70b", "--gpus", "528", *arguments, "--report", str(page), "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert "goodput" in result.output
    assert page.read_text("utf-8").startswith("<!doctype html>")
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    assert rows["price"]["value"] == 2.5
    assert rows["failures"] == rows["failures"] | {"value": 6.5, "source": "--failures"}
    assert rows["mttf_h"]["formula"] == "mttf_s / 3,600"


def test_a_batch_too_small_for_the_cluster_is_said():
    result = run("qwen3-1.7b", "--gpus", "1024", "--batch", "1")
    assert result.exit_code == 0, result.output
    assert "a larger --batch can use more nodes" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("llama-3.1-405b", "--gpus", "0"), "1 or more GPUs"),
        (("llama-3.1-405", "--gpus", "1024"), "did you mean llama-3.1-405b"),
        (("llama-3.1-405b", "--gpus", "16", "--batch", "64"), "What would fit, the least change first: "),
        (("llama-3.1-8b", "--gpus", "64", "--tokens", "inf"), "--tokens must be more than 0"),
        (("llama-3.1-8b", "--gpus", "64", "--price", "inf"), "price of a GPU"),
        (("llama-3.1-8b", "--gpus", "64", "--repair", "1e9"), "none is left to train"),
        (
            ("qwen3-1.7b", "--gpus", "64", "--batch", "64", "--failures", "1e7", "--repair", "0"),
            "of the time",
        ),
        (("llama-3.1-8b", "--gpus", "64", "--fixed", "tp=8"), "does not contain dp"),
        (("llama-3.1-405b", "--gpus", "1024", "--failures", "-1"), "0 or more"),
        (("llama-3.1-405b", "--gpus", "1024", "--failures", "0"), "more than 0"),
        (("llama-3.1-405b", "--gpus", "1024", "--pue", "0.5"), "pue must be 1 or more"),
        (("llama-3.1-405b", "--gpus", "1024", "--tokens", "0"), "--tokens must be more than 0"),
        (("llama-3.1-405b", "--gpus", "1024", "--dtype", "int4"), "bfloat16 or float8"),
        (("llama-3.1-405b", "--gpus", "1024", "--fixed", "tp=8,pp=16,dp=64"), "needs 8,192 GPUs"),
        (("llama-3.1-405b", "--gpus", "1024", "--fixed", "tp=7,pp=16,dp=4"), "tp 7 cannot share"),
        (("llama-3.1-405b", "--gpus", "1024", "--fixed", "tensor=8"), "does not accept 'tensor'"),
        (
            ("llama-3.1-405b", "--gpus", "1024", "--fixed", "tp=8,pp=2,dp=64"),
            "GiB per GPU, but a h100-sxm has",
        ),
    ],
)
def test_nonsense_gets_the_reason(arguments, reason):
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)


def test_the_job_with_the_most_goodput_is_where_the_formula_has_its_top():
    """g × ETTR(g) by Daly's equation 20, with a restart that takes longer for more GPUs."""
    assumed = assumptions()

    def goodput(gpus):
        mttf_s = 86400 / (gpus / 8 * assumed["failures"] / 1000)
        restart_s = assumed["detect"] + 3 + assumed["initialise"] * gpus / 96000
        return gpus * ettr(Recovery(mttf_s, 0.001, restart_s), 5.0)

    best = best_job_gpus(assumed, 8)
    assert goodput(best) >= 0.999 * max(goodput(best * part) for part in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0))


def test_recovery_without_rollback_beats_a_spare_and_a_spare_beats_a_restart(plan):
    sheet = plan.sheet
    assert sheet["ettr_restart"] < sheet["ettr_spare"] < sheet["ettr_replica"] < 1
    assert sheet["pause_restart_s"] > sheet["pause_spare_s"] > sheet["pause_replica_s"]


@pytest.mark.long
def test_inference_beside_training_gets_its_nodes_and_its_users():
    common = ("qwen3-1.7b", "--gpus", "256", "--batch", "64", "--fixed", "tp=1,dp=64")
    served = ("--serve", "llama-3.1-8b", "--input", "200", "--output", "20", "--json", "-")
    rest = {row["name"]: row["value"] for row in json.loads(run(*common, *served).stdout)["rows"]}
    some = {
        row["name"]: row["value"] for row in json.loads(run(*common, *served, "--rate", "100").stdout)["rows"]
    }
    for rows in (rest, some):
        used = rows["job_nodes"] * (1 + rows["further_jobs"]) + rows["inference_nodes"] + rows["spare_nodes"]
        assert used + rows["idle_nodes"] == rows["nodes"] == 32
        assert rows["inference_most_low"] <= rows["inference_most"] <= rows["inference_most_high"]
        assert rows["inference_rate"] <= 1.05 * rows["inference_most_low"]
    assert (
        rest["idle_nodes"] == rest["further_jobs"] == 0 and some["inference_nodes"] < rest["inference_nodes"]
    )


def capstone(gpus, **changes):
    spec = catalog.model("llama-3.1-405b")
    goal = ClusterGoal(
        "llama-3.1-405b", spec, catalog.cluster(gpus, "h100-sxm"), 16384, 8192, 15e12, **changes
    )
    return plan_cluster(goal)


@pytest.mark.thorough
def test_of_800000_gpus_a_job_takes_as_many_as_give_the_most_goodput() -> None:
    plan = capstone(800_000)
    sheet = plan.sheet
    assert 100_000 < sheet["job_gpus"] < 200_000
    assert sheet["further_jobs"] >= 3
    assert 10e6 < sheet["goodput_tok_s_low"] < sheet["goodput_tok_s"] < sheet["goodput_tok_s_high"]
    links = _Links()
    links.feed(report(plan))
    assert set(sheet.figures) <= links.anchors
    one_job = capstone(800_000, recovery="replica").sheet
    assert one_job["job_gpus"] > 300_000 and one_job["goodput_tok_s"] > 2 * sheet["goodput_tok_s"]


@pytest.mark.thorough
def test_goodput_does_not_fall_with_more_gpus() -> None:
    found = [capstone(gpus).sheet["goodput_tok_s"] for gpus in (65_536, 131_072, 262_144, 600_000)]
    assert found == sorted(found)

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
from cumulo.plan.cluster.goal import ClusterGoal, assumptions, job_sizes
from cumulo.plan.cluster.plan import plan_cluster
from cumulo.plan.cluster.report import report
from cumulo.plan.cluster.sheet import value_range
from cumulo.plan.evidence import published
from cumulo.plan.evidence.weights import half_width
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.unnamed import timed_unnamed
from cumulo.spec import catalog

FIXED = "tp=8,pp=16,dp=128,zero=2"  # as Llama 3 was trained


def a_goal(gpus=16640, fixed=FIXED, **changes):
    return ClusterGoal(
        "llama-3.1-405b",
        catalog.model("llama-3.1-405b"),
        catalog.cluster(gpus, "h100-sxm"),
        global_batch=2048,
        sequence_length=8192,
        tokens=15.6e12,
        fixed=fixed,
        **changes,
    )


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


# Published: GPUs of the job, mean time to failure in h, and where. Projections are Meta's own, from RSC-1's rate.
MTTF_H = (
    (1024, 7.9, "RSC-1, measured: Kokolis et al. 2024"),
    (992, 60 * 24 / 105, "OPT-175B: Zhang et al. 2022"),
    (16384, 54 * 24 / 419, "Llama 3: Grattafiori et al. 2024"),
    (16384, 1.8, "RSC-1, projected"),
    (131072, 0.23, "RSC-1, projected"),
    (8192, 24 / (1024 * 2.34e-3), "RSC-2"),
    (12288, 5 * 7 * 24 / 100, "MegaScale: over 100 repairs in several weeks, taken as five"),
)


def failures(gpus, **told):
    """The sheet of a job's failures by formula."""
    replicas = gpus // 8
    goal = ClusterGoal(
        "qwen3-1.7b",
        catalog.model("qwen3-1.7b"),
        catalog.cluster(gpus + 16_000, "h100-sxm"),
        2 * replicas,
        4096,
        1e12,
        fixed=f"tp=8,dp={replicas}",
        assumptions=assumptions(told),
    )
    return plan_cluster(goal).sheet


@pytest.mark.parametrize(("gpus", "mttf_h", "source"), MTTF_H)
def test_the_range_of_the_time_to_failure_contains_what_was_published(gpus, mttf_h, source):
    sheet = failures(gpus)
    assert sheet["mttf_h_low"] < mttf_h < sheet["mttf_h_high"], source
    assert sheet["mttf_h_low"] < sheet["mttf_h"] < sheet["mttf_h_high"]


def test_the_range_of_the_ettr_contains_that_of_published_failure_rates():
    """Llama 3, MegaScale (both "more than 90%"), and Meta's two clusters at 98,304 GPUs."""
    for gpus in (12288, 16384):
        sheet = failures(gpus)
        assert 0.9 < sheet["ettr_low"] < 0.96 and sheet["ettr_high"] > 0.99
    sheet = failures(98304)
    for rate in (6.5, 2.34):
        recovery = Recovery(86400 / (12288 * rate / 1000), sheet["copy_s"], sheet["pause_restart_s"])
        assert sheet["ettr_low"] < ettr(recovery, sheet["interval_partner_s"]) < sheet["ettr_high"]
    assert sheet["ettr_high"] - sheet["ettr_low"] > 0.25
    assert sheet["goodput_tok_s_low"] < sheet["training_tok_s_low"] * sheet["ettr"]
    assert sheet["days_high"] / sheet["days"] > sheet["ettr"] / sheet["ettr_low"] > 1


def test_a_rate_of_ones_own_has_no_range(plan):
    mine = plan_cluster(a_goal(assumptions=assumptions({"failures": 3.79, "detect": 120.0}))).sheet
    assert mine["mttf_h_low"] == mine["mttf_h"] == mine["mttf_h_high"] == plan.sheet["mttf_h"]
    assert value_range(mine, "mttf_h") == "" and value_range(plan.sheet, "mttf_h") != ""
    assert mine["ettr_low"] > plan.sheet["ettr_low"]
    assert mine.figures["failures_range"].source == "--failures is given"
    assert mine["goodput_tok_s_low"] > plan.sheet["goodput_tok_s_low"]  # the step's range is left
    assert mine["goodput_tok_s_low"] < 0.9 * mine["goodput_tok_s"]


def test_what_is_larger_than_anything_published_is_marked_as_extrapolated(plan):
    largest = max(row.job.layout.world for row in (*published.rows(), *published.held_out_rows()))
    assert plan.sheet["published_step"] == largest
    assert not any(figure.extrapolated for figure in plan.sheet.figures.values())
    larger = plan_cluster(a_goal(34_000, "tp=8,pp=16,dp=256,zero=2"))
    figures = larger.sheet.figures
    for name in ("step_s", "mfu", "mttf_h", "ettr", "ettr_low", "goodput_tok_s_high", "days", "cost_run"):
        assert figures[name].extrapolated, name
    for name in ("job_gpus", "spare_nodes", "switches", "checkpoint_bytes", "facility_w", "initialise_s"):
        assert not figures[name].extrapolated, name
    page = report(larger)
    assert "Extrapolated:</b> the job has 32,768 GPUs" in page and ">extrapolated<" in page
    assert "xtrapolated" not in report(plan)


def test_a_step_far_beyond_published_sizes_has_a_wider_range():
    model = catalog.model("llama-3.1-405b")

    def width(replicas):
        goal = TrainGoal(model, catalog.cluster(128 * replicas, "h100-sxm"), 16 * replicas, 8192)
        return half_width(fixed_job("tp=8,pp=16", goal), goal.cluster, unnamed=True)

    assert width(1280) > 1.4 * width(16)  # 163,840 and 2,048 GPUs


def test_a_layout_takes_the_time_that_plan_train_says(plan):
    goal = TrainGoal(
        catalog.model("llama-3.1-405b"), catalog.cluster(16384, "h100-sxm"), 2048, 8192, software_named=False
    )
    theirs, _ = timed_unnamed(FIXED, goal)
    assert plan.sheet["step_s"] == theirs.estimate.step_s
    assert plan.sheet["step_s_high"] == theirs.estimate.interval.high


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
    assert 5e6 < sheet["goodput_tok_s_low"] < sheet["goodput_tok_s"] < sheet["goodput_tok_s_high"]
    links = _Links()
    links.feed(report(plan))
    assert set(sheet.figures) <= links.anchors
    one_job = capstone(800_000, recovery="replica").sheet
    assert one_job["job_gpus"] > 300_000 and one_job["goodput_tok_s"] > 2 * sheet["goodput_tok_s"]


@pytest.mark.thorough
def test_goodput_does_not_fall_with_more_gpus() -> None:
    found = [capstone(gpus).sheet["goodput_tok_s"] for gpus in (65_536, 131_072, 262_144, 600_000)]
    assert found == sorted(found)

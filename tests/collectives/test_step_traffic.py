"""A training step's communication on a fabric: cumulo/plan/time/step_traffic.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cumulo.collectives.simulate.fabrics.build import fabric_graph
from cumulo.collectives.simulate.fabrics.links import Routing
from cumulo.collectives.simulate.place import placed
from cumulo.layout.layout import Layout
from cumulo.plan.job import TrainJob
from cumulo.plan.time.step_traffic import AxisTime, play_step, step_calls
from cumulo.spec import catalog
from tests.whole_command import app

JOB = TrainJob(
    catalog.model("llama-3.1-70b"), Layout(dp=32, tp=8, pp=4, zero=1, sequence_parallel=True), 128, 4096
)


def play(ratio: float, placement: str, order: str = "dp") -> dict[str, AxisTime]:
    cluster = catalog.cluster(1024, "h100-sxm", fabric="llama3-roce")
    cluster = replace(cluster, fabric=replace(cluster.fabric, oversubscription=(1.0, ratio)))
    graph = fabric_graph(cluster, pod_gpus=256)
    gpus = placed(0, 1023, placement, 8, graph)
    calls = step_calls(JOB, 8, order)  # type: ignore[arg-type]
    return {f"{one.axis} {one.collective}": one for one in play_step(calls, graph, Routing("adaptive"), gpus)}


def test_an_oversubscribed_tier_costs_nothing_by_pod_and_its_ratio_across_pods() -> None:
    flat, by_pod, across = play(1.0, "packed"), play(7.0, "packed"), play(7.0, "scattered")
    name = "dp reduce_scatter"
    assert by_pod[name].call_s == pytest.approx(flat[name].call_s, rel=0.01)
    assert by_pod[name].far_share < 0.15 < 0.7 < across[name].far_share
    assert 4.5 * flat[name].call_s < across[name].call_s < 7.5 * flat[name].call_s
    assert across["tp all_gather"].call_s == flat["tp all_gather"].call_s  # NVLink is below all of it


def test_the_outermost_axis_is_the_one_that_leaves_the_pods() -> None:
    stages, copies = play(7.0, "packed", "pp"), play(7.0, "packed", "dp")
    assert stages["dp all_gather"].far_share == 0 < stages["pp neighbours"].far_share
    assert copies["pp neighbours"].far_share == 0 < copies["dp all_gather"].far_share


def test_bytes_are_those_that_the_cost_model_counts() -> None:
    from cumulo.plan.time.step import estimate

    counted = dict(estimate(JOB, catalog.cluster(1024, "h100-sxm"), explain=False).link_bytes)
    sent = dict.fromkeys(("tp", "pp", "dp"), 0.0)
    for call in step_calls(JOB, 8):
        n = call.groups.shape[1]
        each = 2 * call.size_bytes if call.axis == "pp" else call.size_bytes * (n - 1) / n
        sent[call.axis] += call.calls * each
    assert sent["tp"] == pytest.approx(counted["tp"])
    assert sent["dp"] == pytest.approx(counted["dp"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("simulate network --gpus 64 --fabric rail-roce --size 1MiB", "all_reduce: time"),
        ("simulate network --gpus 64 --fabric rail-roce --collective incast --size 1MB", "incast: time"),
        ("simulate network --gpus 16 --sites 2 --size 1MiB --routing static", "between sites"),
        ("network lint rail-roce --gpus 64", "nothing is hashed"),
        ("network lint examples/network/two_flows.yaml", "safe with these flows"),
        ("diagnose examples/network/slow_all_reduce.txt", "rails of h100-03 is missing"),
        ("topology examples/network/topo_h100.txt", "GPU7: card mlx5_7 (PIX)"),
    ],
)
def test_the_commands_answer(line: str, told: str) -> None:
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert told in " ".join(done.output.split())


def test_a_deadlock_ends_the_lint_with_status_1_and_a_heat_map_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["network", "lint", "examples/network/three_switches.yaml"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 1 and "L0 → S0 → L2 → S1 → L0" in done.output
    file = tmp_path / "links.html"
    done = CliRunner().invoke(
        app, ["simulate", "network", "--gpus", "64", "--size", "1MiB", "--heat-map", str(file)]
    )
    assert done.exit_code == 0
    text = file.read_text("utf-8")
    assert text.startswith("<!doctype html>") and "node 0 GPU 0 → leaf 0" in text

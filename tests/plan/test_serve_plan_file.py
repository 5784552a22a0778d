"""A deployment as a file: what is written is what is read, and what this machine cannot start is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from cumulo.cli.serve import _served, with_plan
from cumulo.cli.shared.serve_options import ServeCommandOptions
from cumulo.errors import ConfigError
from cumulo.plan.serve.capacity import play
from cumulo.plan.serve.deployment import Deployment, Promised, promised
from cumulo.plan.serve.plan_file import ServePlanFile, check_places, plan_file, plan_text, read_plan
from cumulo.plan.serve.traffic import Traffic
from tests.plan.test_serve_search import SLO, replica, some_traffic


def deployment(**changes: int) -> Deployment:
    one = replace(replica(tp=2, weights="float8"), max_tokens_per_step=2048)
    report = play(one, some_traffic(20).at_rate(2.0))
    return replace(Deployment(one, 3, 0, 6.0, report, 30.0), **changes)


def test_a_plan_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for one in (deployment(), deployment(prefill_replicas=2)):
        written = plan_file(one, "llama-3.1-8b", SLO)
        path.write_text(plan_text(written, "cumulo plan serve"))
        assert read_plan(path) == written
        assert written.model is None and written.planned_for.catalogue_model == "llama-3.1-8b"
        assert (written.tp, written.weights, written.device) == (2, "fp8", "cuda")
        assert written.max_tokens_per_step == 2048 and written.max_running == 512
    assert (written.prefill, written.decode, written.replicas) == (2, 3, 1)
    assert plan_file(one, str(tmp_path), SLO).model == str(tmp_path)


def test_a_plan_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    text = plan_text(plan_file(deployment(), "llama-3.1-8b", SLO), "")
    path.write_text(text + "routr: round-robin\n")
    with pytest.raises(ConfigError, match=r"'routr'.*'router'"):
        read_plan(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read the plan"):
        read_plan(path)


@pytest.mark.parametrize(
    ("changes", "present", "says"),
    [
        ({}, 4, "3 engines of 2 ranks, and this machine has 4 GPUs: start 2 of them here with --replicas 2"),
        ({}, 1, "has 1 GPUs: plan with --max-gpus 1"),
        ({}, 0, "plan for a device that this machine has"),
        (
            {"prefill_replicas": 1},
            7,
            "4 engines of 2 ranks, and this machine has 7 GPUs: plan with --max-gpus 7",
        ),
    ],
)
def test_more_ranks_than_devices_are_refused_with_what_would_work(
    changes: dict[str, int], present: int, says: str
) -> None:
    plan: ServePlanFile = plan_file(deployment(**changes), "llama-3.1-8b", SLO)
    check_places(plan, plan.ranks, "GPUs")
    with pytest.raises(ConfigError, match=says):
        check_places(plan, present, "GPUs")


def test_the_server_of_a_plan_promises_what_was_planned_for(tmp_path: Path) -> None:
    path, slo = tmp_path / "plan.yaml", replace(SLO, ttft_s=0.0125)
    one = replace(deployment(), replica=replace(replica("cpu"), weights="float32"), replicas=1)
    path.write_text(plan_text(plan_file(one, str(tmp_path), slo, Promised("refuse", 0.005, 0.9975)), ""))
    served = _served(with_plan(ServeCommandOptions(), path)).engine
    assert served.slo is not None and served.slo.bounds == {"ttft": 0.0125, "itl": 0.03}
    assert served.slo_late == "refuse"
    told = read_plan(path).planned_for
    assert told.kept_share == 0.9975 and "99.75% of promises kept" in str(told)
    path.write_text(plan_text(plan_file(one, str(tmp_path), slo), ""))
    assert _served(with_plan(ServeCommandOptions(), path)).engine.slo is None


def test_requests_that_a_plan_counts_on_are_not_refused() -> None:
    one, traffic = replica(), some_traffic(40).at_rate(4.0)
    easy = promised(one, traffic, SLO)
    assert (
        easy is not None and (easy.late, easy.unpromised_share) == ("refuse", 0.0) and easy.kept_share > 0.99
    )
    crowd = Traffic(tuple(replace(one, arrived_s=0.01 * i) for i, one in enumerate(traffic.arrivals)))
    hard = promised(one, crowd, replace(SLO, ttft_s=0.1))
    assert hard is not None and hard.late == "queue" and 0 < hard.unpromised_share < 1
    assert plan_file(deployment(), "llama-3.1-8b", SLO, hard).slo_late == "queue"
    assert promised(one, crowd, replace(SLO, ttft_s=1e-4)) is None


def test_every_option_of_a_plan_reaches_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    chosen = replace(
        replica("cpu"), weights="float32", max_tokens_per_step=256, max_running=64, max_loras=3, max_lora_rank=8,
        kv_host_gib=2.0, kv_disk="/var/cache/kv", kv_disk_gib=9.0, acceptance=0.5,
        speculate="/models/head",
    )  # fmt: skip
    planned = plan_file(replace(deployment(), replica=chosen, replicas=1), str(tmp_path), SLO)
    path.write_text(plan_text(replace(planned, kv_dtype="fp8"), ""))
    engine = _served(with_plan(ServeCommandOptions(), path)).engine
    told = {
        "max_tokens_per_step": 256, "max_running": 64, "max_loras": 3, "max_lora_rank": 8, "kv_host_gib": 2.0,
        "kv_disk": "/var/cache/kv", "kv_disk_gib": 9.0, "speculate": "/models/head",
        "kv_dtype": "fp8", "device": "cpu",
    }  # fmt: skip
    assert {name: getattr(engine, name) for name in told} == told

"""The network model against measurements nobody here made: cumulo/plan/network, benchmarks/fit_network.py."""

import statistics
from pathlib import Path

import pytest
import yaml

import cumulo.plan
from benchmarks.fit_network import measured, published

MEASURED = list(measured())
PUBLISHED = list(published())


def median_error(rows):
    return statistics.median(abs(row.error) for row in rows)


def test_all_measured_rows_are_there():
    assert len(MEASURED) == 1840  # 2,338 measurements; those of the same kind, device and NCCL are one mean
    assert {row.size_bytes for row in MEASURED} == {512 * 2**i for i in range(21)}
    assert {row.ranks for row in MEASURED} == {2, 4, 8}


@pytest.mark.parametrize("device", ["a100-80gb", "h100-sxm"])
def test_nccl_on_one_node_is_predicted_within_10_percent_in_the_median(device):
    rows = [row for row in MEASURED if row.run.startswith(device)]
    assert median_error(rows) < 0.065
    assert sorted(abs(row.error) for row in rows)[int(0.9 * len(rows))] < 0.20


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("device", ["a100-80gb", "h100-sxm"])
def test_so_is_every_operation_at_every_number_of_gpus(device, kind, ranks):
    rows = [r for r in MEASURED if r.run.startswith(device) and r.kind == kind and r.ranks == ranks]
    assert median_error(rows) < 0.10


def test_a_generation_has_no_more_than_twelve_fitted_numbers():
    path = Path(cumulo.plan.__file__).parent / "data" / "collectives.yaml"
    for profile in yaml.safe_load(path.read_text("utf-8"))["profiles"].values():
        assert len(set(profile) - {"evidence", "ll_far_gbps"}) == 12


def test_published_runs_of_several_domains_are_predicted_within_20_percent():
    rows = [row for row in PUBLISHED if row.domains > 1]
    assert len(rows) == 114
    assert median_error(rows) < 0.08


@pytest.mark.parametrize("run", sorted({row.run for row in PUBLISHED} - {"aws-p5-2023"}))
def test_so_is_every_run_but_the_one_of_older_software(run):
    assert median_error([row for row in PUBLISHED if row.run == run]) < 0.15


def test_calls_timed_one_by_one_from_python_are_predicted_with_what_a_lone_call_adds():
    rows = [row for row in PUBLISHED if row.run == "aws-p6-b200"]
    assert median_error(rows) < 0.10
    assert max(abs(row.error) for row in rows) < 0.30  # a ring's longest way crosses each border twice


def test_cards_of_a_run_can_be_given_to_leave_it_out():
    slower = [row for row in published({"aws-p5": 0.5}) if row.run == "aws-p5"]
    usual = [row for row in PUBLISHED if row.run == "aws-p5"]
    assert slower[-1].predicted_s > 1.3 * usual[-1].predicted_s
    # Eight bytes do not wait for a card.
    assert slower[0].predicted_s == pytest.approx(usual[0].predicted_s, rel=0.01)

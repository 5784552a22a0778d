"""The memory ledger against peaks that Megatron measured, and against runs that are known to have fitted."""

import csv
import statistics
from pathlib import Path

import pytest

from cumulo.plan.evidence.published import held_out_rows, rows
from cumulo.plan.memory import peak as framework
from cumulo.plan.memory.peak import peak_memory, stage_memory
from cumulo.plan.search.fixed import fitted
from tests.plan.megatron_rows import ROWS, MeasuredPeak, job_of_row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_measured_peak_is_met_within_10_percent(row: MeasuredPeak) -> None:
    predicted = stage_memory(row.job, row.job.layout.pp - 1).peak
    assert predicted == pytest.approx(row.peak_bytes, rel=0.10)


SHARED = Path(__file__).parents[3] / "shared/data/training/megatron_golden_memory_time.csv"


@pytest.mark.skipif(not SHARED.exists(), reason="the table of all measured cases is not here")
def test_all_measured_peaks_are_met_within_10_percent_at_the_median() -> None:
    errors = []
    with SHARED.open() as file:
        for row in csv.DictReader(file):
            if (job := job_of_row(row)) is not None:
                measured = float(row["mem_max_alloc_bytes"])
                errors.append(abs(stage_memory(job, job.layout.pp - 1).peak / measured - 1))
    assert len(errors) > 200
    assert statistics.median(errors) < 0.04
    assert statistics.quantiles(errors, n=10)[7] < 0.10


def test_memory_that_nvidia_smi_showed_of_blooms_trials_is_predicted() -> None:
    measured = {
        line["id"]: float(line["gib"])
        for line in csv.DictReader(
            (Path(framework.__file__).parents[1] / "data" / "published_memory.csv").open()
        )
    }
    by_name = {row.name: row for row in rows()}
    errors = sorted(
        abs(peak_memory(by_name[name].job).total / 2**30 / gib - 1) for name, gib in measured.items()
    )
    assert errors[len(errors) // 2] <= 0.05
    assert errors[int(0.9 * len(errors))] <= 0.15


def test_no_layout_that_is_known_to_have_run_is_refused() -> None:
    chosen = 0
    for row in (*rows()[::12], *held_out_rows()[::3]):
        limit = row.cluster.device.memory_bytes
        found = fitted(row.job, limit, ("recompute",) if row.job.recompute != "none" else ())
        assert peak_memory(found.job).total <= limit, row.name
        assert bool(found.saved_by) == (peak_memory(row.job).total > limit)
        chosen += bool(found.saved_by)
    assert chosen > 2


def test_what_a_user_says_of_recomputation_is_kept() -> None:
    row = next(row for row in rows() if row.name == "bridge-26.02-gb200-llama3_70b-64-fp8")
    limit = row.cluster.device.memory_bytes
    assert "recomputed" in fitted(row.job, limit).saved_by[0]
    assert fitted(row.job, limit, ("recompute",)).job.recompute == "none"

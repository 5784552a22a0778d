"""`cumulo diagnose` on pasted outputs: cumulo/plan/diagnose. The texts have the formats of the real tools; those of
held_out/ were written before the rules; two rules were changed after one of them was called healthy wrongly."""

import json
from pathlib import Path

import pytest

from cumulo.plan.diagnose.nccl_tests_text import parse_nccl_tests
from cumulo.plan.diagnose.verdict import CAUSES, diagnose

OUTPUTS = Path(__file__).parent / "outputs"
LABELS: dict[str, dict[str, str]] = json.loads((OUTPUTS / "labels.json").read_text())


@pytest.mark.parametrize("split", LABELS)
def test_nine_of_ten_causes_are_named_and_none_is_called_healthy_wrongly(split: str) -> None:
    found = {name: diagnose((OUTPUTS / split / f"{name}.txt").read_text()).cause for name in LABELS[split]}
    wrong = {name: cause for name, cause in found.items() if cause != LABELS[split][name]}
    assert len(wrong) <= 0.1 * len(found), wrong
    assert "healthy" not in wrong.values(), wrong


def test_every_cause_comes_with_a_title_and_with_what_to_run_next() -> None:
    for name, label in list(LABELS["tuned"].items())[::3]:
        found = diagnose((OUTPUTS / "tuned" / f"{name}.txt").read_text())
        assert found.cause in CAUSES and found.sentence
        assert found.next_steps or label == "healthy"


@pytest.mark.parametrize(
    "text", ["", "hello", "1 2 3 4 5 6 7 8", "{}", "NCCL INFO", "# Avg bus bandwidth    : 3", "{" * 500]
)
def test_what_says_nothing_is_not_judged(text: str) -> None:
    assert diagnose(text).cause == "unknown"


def test_ranks_follow_from_the_ratio_of_bandwidths() -> None:
    line = "8589934592 2147483648 float sum -1 44037 195.06 386.07 0 44037 195.06 386.07 0"
    test = parse_nccl_tests(line)
    assert test is not None
    inferred = test.inferred_ranks()
    assert inferred is not None and round(inferred[0]) in range(94, 99)  # two digits tell no more


@pytest.mark.parametrize(
    "line",
    [
        "[1,0]<stdout>:   134217728      33554432     float     sum      -1   1542.0   87.04  163.20      0 "
        "  1546.1   86.81  162.76      0",
        "   134217728      33554432   float     sum     1542.0   87.04  163.20  1e-06   1546.1   86.81  "
        "162.76  1e-06",
        "|  128MB |  163.20GBps |   87.04GBps |",
        "worker-0: 134217728 33554432 bfloat16 sum -1 1542.0 87.04 163.20 N/A",
        "   134217728      33554432     float    none      -1   1542.0   87.04  163.20      0",
    ],
)
def test_rows_are_found_in_all_versions_of_the_table(line: str) -> None:
    test = parse_nccl_tests(line)
    assert test is not None and test.rows[0].busbw == 163.20 and test.rows[0].size_bytes == 1 << 27

"""`cumulo bench kernels --tune` and the benchmark rows, with the clock replaced: what they do around the timing is
right."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from cumulo.bench.gpu import products, report, timing, tune
from cumulo.bench.gpu.attention import chunk, decodes
from cumulo.bench.gpu.report import Ceilings, as_row
from cumulo.bench.gpu.timing import KernelRow, Work
from cumulo.bench.gpu.tune import MODELS, Shape, candidates
from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.linear import linear, small_linear
from cumulo.kernels.cuda.linear.linear import ROW_CLASSES, Choice, choose, shape_key

CEILINGS = Ceilings(4e12, 700e12, 1200e12)


@pytest.fixture(autouse=True)
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WINNERS", {})


@pytest.mark.long
def test_the_quickest_candidate_is_kept_and_one_that_fails_is_passed_over(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape("tiny gate/up", 16, 1024, norm=True, swiglu=True)
    options = [choice for choice in candidates(shape, 1, "bf16") if choice.kernel != "dot"]
    assert len(options) > 4
    times = iter([5.0, None, 2.0] + [9.0] * len(options))

    def clock(work: Callable[[int], object], *_: object, **__: object) -> float:
        work(0)
        us = next(times)
        if us is None:
            raise RuntimeError("out of resource: shared memory")
        return us

    monkeypatch.setattr(tune, "graph_us", clock)
    monkeypatch.setattr(tune, "candidates", lambda *_: options)
    monkeypatch.setattr(tune, "compiling_ahead", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    weight = torch.randn(16, 1024, device=device).bfloat16()
    line = tune.tune_product(shape, "bf16", 1, [weight])
    assert choose(1, weight, swiglu=True) == options[2]
    assert "1 refused" in line and "2.0 us" in line


@pytest.mark.parametrize("kind", list(MODELS))
def test_candidates_are_few_and_fit_the_rows(kind: str) -> None:
    for model in MODELS[kind]:
        for shape in model:
            for m in ROW_CLASSES:
                found = candidates(shape, m, kind)
                assert found[0] == Choice("library") and 2 <= len(found) <= 56
                assert len(set(found)) == len(found)
                assert m <= small_linear.MAX_ROWS or all(choice.kernel != "small" for choice in found)


def test_a_table_that_cannot_be_measured_does_not_cost_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(tell: Callable[[str], None]) -> dict[str, object]:
        raise RuntimeError("no room")

    table = {"bf16 m1 n64 k32": {"kernel": "library", "config": None}}
    monkeypatch.setattr(tune, "TUNERS", {"moe": failing, "linear": lambda tell: table})
    monkeypatch.setattr(registry, "device_name", lambda device: "Some GPU")
    path, told = tmp_path / "new" / "some-gpu.json", list[str]()
    tune.tune_all(told.append, path=path)
    written = json.loads(path.read_text())
    assert written["device"] == "Some GPU" and written["tables"] == {"linear": table}
    assert any("moe failed: RuntimeError: no room" in line for line in told)
    written["tables"]["older"] = {"kept": 1}
    path.write_text(json.dumps(written))
    tune.tune_all(told.append, ["linear"], path)
    assert set(json.loads(path.read_text())["tables"]) == {"linear", "older"}


def test_rows_between_two_classes_take_the_choice_of_the_larger() -> None:
    assert shape_key(3, 8, 8, "bf16", False) == shape_key(4, 8, 8, "bf16", False)
    assert shape_key(9, 8, 8, "bf16", False) == shape_key(16, 8, 8, "bf16", False)
    assert shape_key(129, 8, 8, "bf16", False) != shape_key(128, 8, 8, "bf16", False)


def test_up_to_eight_rows_take_the_choice_of_sixteen_where_nothing_else_was_measured() -> None:
    weight = torch.empty(8, 16, dtype=torch.bfloat16)
    sixteen, eight = Choice("skinny"), Choice("library")
    linear.WINNERS[shape_key(16, 8, 16, "bf16", False)] = sixteen
    assert [choose(m, weight) for m in (5, 8, 16)] == [sixteen] * 3
    assert choose(4, weight) != sixteen
    linear.WINNERS[shape_key(8, 8, 16, "bf16", False)] = eight
    assert [choose(m, weight) for m in (5, 8, 16)] == [eight, eight, sixteen]


def test_rows_of_products_come_out_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each kind of weight: the interpreter is slow."""
    once = lambda work, *_, **__: work(0) is None or 1.0  # noqa: E731
    monkeypatch.setattr(timing, "graph_us", once)
    monkeypatch.setattr(products, "copies_past_cache", lambda _: 2)
    monkeypatch.setattr(products, "SHAPES", (("Llama tiny", 32, 128, 1.0),))
    monkeypatch.setattr(products, "prepare", lambda _: None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    monkeypatch.setattr(products, "randn", lambda *size, std=1.0: torch.randn(*size, device=device).to(dtype))
    row = next(iter(products.linear_rows()))
    assert row.work.bytes > 0 and row.work.flops > 0 and row.rivals_us and row.error is not None
    assert row.error < 1e-2 and "n=32" in row.shape


def test_a_row_says_its_rate_its_share_of_the_roofline_and_its_rivals() -> None:
    work = Work(bytes=400_000_000, flops=1_000_000)
    row = KernelRow("copy", "large", work, 125.0, {"torch": 250.0}, error=1e-3, must_us=130.0, aim_us=110.0)
    found = as_row(row, CEILINGS).as_dict()
    assert found["value"] == 125.0 and found["must"] == 130.0 and found["aim"] == 110.0
    assert found["note"] == "3.20 TB/s, 80% of roofline, 2.00x torch, error 0.001"
    assert found["bound"] == "memory" and found["roofline_share"] == 0.8
    fast = KernelRow("product", "large", Work(1000, 600_000_000), 1.0, dtype="float8_e4m3fn")
    assert as_row(fast, CEILINGS).note == "600 TFLOP/s, 50% of roofline"


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_a_wrong_result_is_no_result(error: float) -> None:
    found = as_row(KernelRow("copy", "large", Work(1000), 1.0, error=error), CEILINGS).as_dict()
    assert found["value"] is None and found["must"] is not None and "WRONG" in found["note"]
    json.dumps(found, allow_nan=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing fails here")
def test_an_operation_that_fails_is_a_row_with_its_error() -> None:
    (row,) = report.guarded("swiglu", CEILINGS)
    assert row.name == "swiglu" and row.value is None and row.must == 0.0 and row.note


def test_work_of_attention_counts_what_is_seen() -> None:
    decode = decodes(1, 1000, 32, 8).work
    assert decode.bytes == 2 * 1000 * 8 * 128 * 2 + 2 * 32 * 128 * 2
    assert decode.flops == 4 * 32 * 128 * 1000
    assert chunk(4, 4, 1, 1).work.flops == 4 * 128 * (1 + 2 + 3 + 4)

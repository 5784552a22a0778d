"""linear_tune and the benchmark rows, with the clock replaced: what they do around the timing is right."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from cumulo.kernels.cuda.linear import fp8, invariant_matmul, linear, skinny_linear, small_linear, w4
from cumulo.kernels.cuda.linear import tune as linear_tune
from cumulo.kernels.cuda.linear.linear import ROW_CLASSES, Choice, choose, shape_key
from cumulo.kernels.cuda.linear.tune import MODELS, Product, candidates


@pytest.fixture(autouse=True)
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WINNERS", {})


def once(work: Callable[[int], object], *_: object, **__: object) -> float:
    """In place of the clock: does the work once and calls it a microsecond."""
    work(0)
    return 1.0


def test_the_quickest_candidate_is_kept_and_one_that_fails_is_passed_over(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product("tiny gate/up", 16, 1024, norm=True, swiglu=True)
    options = candidates(product, 1, "bf16")
    assert len(options) > 4
    times = iter([5.0, None, 2.0] + [9.0] * len(options))

    def clock(work: Callable[[int], object], *_: object, **__: object) -> float:
        work(0)
        us = next(times)
        if us is None:
            raise RuntimeError("out of resource: shared memory")
        return us

    monkeypatch.setattr(linear_tune, "graph_us", clock)
    generator = torch.Generator(device).manual_seed(0)
    weight = linear_tune._weight(product, "bf16", device, generator)
    line = linear_tune._tune_one(product, "bf16", 1, [weight], device, generator)
    assert choose(1, weight, swiglu=True) == options[2]
    assert "1 refused" in line and "library     5.0" in line


@pytest.mark.parametrize("kind", ["bf16", "fp8", "w4"])
def test_candidates_are_few_and_fit_the_rows(kind: str) -> None:
    for model in MODELS.values():
        for product in model:
            for m in ROW_CLASSES:
                found = candidates(product, m, kind)
                assert found[0] == Choice("library") and 2 <= len(found) <= 40
                assert len(set(found)) == len(found)
                assert m <= small_linear.MAX_ROWS or all(choice.kernel != "small" for choice in found)


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


@pytest.mark.parametrize("op", [small_linear, skinny_linear, w4, linear, fp8, invariant_matmul])
def test_benchmark_rows_come_out_whole(
    op: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "graph_us", once)
    monkeypatch.setattr(op, "copies_past_cache", lambda _: 2, raising=False)
    tiny = ((16, 32, 128),) if op is invariant_matmul else (("Llama tiny", 32, 128, 1.0),)
    monkeypatch.setattr(op, "BENCH_SHAPES", tiny)
    rows: Iterator[small_linear.KernelRow] = op.bench_rows(device)
    for row in rows:
        assert row.work.bytes > 0 and row.work.flops > 0 and row.rivals_us and row.error is not None
        assert "32" in row.shape
        if "m=64" in row.shape or device.type == "cpu":
            break  # one row shows that the loop's body is sound; the interpreter is slow

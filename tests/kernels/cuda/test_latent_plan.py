"""Latent attention of whole steps, chunks and decodes together, and what comes before it, against torch."""

import pytest
import torch

from cumulo.kernels.cuda.attention.mla_cache import mla_cache
from cumulo.kernels.cuda.attention.mla_cache import reference as cache_reference
from cumulo.kernels.cuda.attention.mla_chunk import MlaChunkConfig
from cumulo.kernels.cuda.attention.mla_decode import MlaConfig
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from tests.kernels.cuda.compile_sm90 import SHARED_BYTES_PER_BLOCK, Case, compile_for_sm90
from tests.kernels.cuda.paged_case import PagedCase
from tests.kernels.cuda.test_attention_on_gpu import TYPES
from tests.kernels.cuda.tolerance import poisoned, relative_error

RANK, ROPE = 32, 16
DECODE = MlaConfig(rows=16, key_tile=16, num_warps=4, num_stages=2, items_per_sm=9, min_tiles=1)
CHUNK = MlaChunkConfig(rows=16, key_tile=16, num_warps=4, num_stages=2)


def latent_case(sequences: list[tuple[int, int]], heads: int, device: torch.device) -> PagedCase:
    return PagedCase(sequences, heads, 1, RANK + ROPE, RANK, device=device)


def run(
    case: PagedCase,
    invariant: bool = False,
    chunk: MlaChunkConfig | None = CHUNK,
    window: int | None = None,
) -> torch.Tensor:
    """Every number written, and as exact as torch's in the same dtype."""
    return case.check(
        {"invariant": invariant, "windows": (window,), "decode": DECODE, "chunk": chunk}, window=window
    )


@pytest.mark.long
@pytest.mark.parametrize("heads", [3, 4, 24])  # rows left over; rows filled; more heads than a program takes
def test_chunks_and_decodes_of_one_step_match(heads: int, device: torch.device) -> None:
    run(latent_case([(5, 5), (1, 40), (2, 33), (1, 1), (9, 20), (0, 0)], heads, device))


def test_chunks_with_a_window_match_from_the_first_tile_a_row_sees_nothing_of(device: torch.device) -> None:
    run(latent_case([(30, 60), (1, 50), (3, 3)], 2, device), window=5)


@pytest.mark.long
def test_the_default_tiles_match_on_pages_of_any_size(device: torch.device) -> None:
    for block_size in (16, 64):  # half of a key tile, two of them
        case = PagedCase([(7, 70), (1, 90)], 16, 1, RANK + ROPE, RANK, block_size=block_size, device=device)
        run(case, chunk=None)


def test_bits_depend_neither_on_company_nor_on_how_a_context_was_cut(device: torch.device) -> None:
    case = latent_case([(20, 20), (3, 40)], 3, device)
    whole = run(case, invariant=True)[:20]
    start = 0
    for count in (1, 6, 4, 8, 1):
        piece = latent_case([(count, start + count)], 3, device)
        piece.keys, piece.block_tables = case.keys, case.block_tables[:1]
        piece.query = case.query[start : start + count]
        assert torch.equal(run(piece, invariant=True), whole[start : start + count])
        start += count


def test_plans_that_run_one_after_the_other_share_their_scratch(device: torch.device) -> None:
    def plan(sequences: int, other: AttentionPlan | None) -> AttentionPlan:
        return AttentionPlan(
            64, sequences, 4, 1, RANK + ROPE, 16, 8, False, False, device, rank=RANK, share_scratch_with=other
        )

    large = plan(8, None)
    small = plan(4, large)
    assert small.partial is large.partial
    larger = plan(16, small)
    assert larger.partial is not large.partial
    assert larger.nbytes > large.nbytes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_are_normed_rotated_and_paged_and_queries_rotated(
    interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, heads, nope, blocks, size = 5, 3, 8, 4, 16
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    projected, wide, norm = random(tokens, heads, nope + ROPE), random(tokens, RANK + ROPE + 4), random(RANK)
    compressed = wide[:, : RANK + ROPE]
    angles = torch.rand((40, ROPE // 2), generator=generator).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.tensor([7, 0, 39, 8, 3], dtype=torch.int32, device=device)
    slots = torch.tensor([33, 0, 17, -1, 63], dtype=torch.int32, device=device)
    query = poisoned(tokens, heads, RANK + ROPE, dtype=dtype, device=device)
    keys = poisoned(blocks, 1, size, RANK + ROPE, dtype=dtype, device=device)
    mla_cache(projected, compressed, norm, cos, sin, positions, slots, query, keys, 1e-6, interleaved)
    live, flat = slots >= 0, keys.view(-1, RANK + ROPE)
    assert flat.isnan().all(-1).sum() == blocks * size - 4  # nothing but the four live tokens' keys
    assert query[..., :RANK].isnan().all() and query[~live].isnan().all()
    found = query[live][..., RANK:], flat[slots[live].long()]
    inputs = [x.double() for x in (projected, compressed, norm, cos, sin)]
    exact = cache_reference(*inputs, positions.long(), ROPE, 1e-6, interleaved)
    same = cache_reference(projected, compressed, norm, cos, sin, positions.long(), ROPE, 1e-6, interleaved)
    for ours, right, torchs in zip(found, exact, same, strict=True):
        allowed = 2 * max(relative_error(torchs[live], right[live]), torch.finfo(dtype).eps / 2)
        assert relative_error(ours, right[live]) <= allowed


def test_eight_bit_latents_are_widened(device: torch.device) -> None:
    case = PagedCase([(4, 20), (1, 30)], 4, 1, RANK + ROPE, RANK, kv_dtype=torch.float8_e4m3fn, device=device)
    case.check({"decode": DECODE, "chunk": CHUNK})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_of_deepseeks_shape_matches(heads: int, device: torch.device) -> None:
    rank, rope = 512, 64
    sequences = [(1, 3000), (300, 700), (1, 65), (17, 17), (1, 1), (0, 0)]
    case = PagedCase(
        sequences, heads, 1, rank + rope, rank, block_size=64, dtype=torch.bfloat16, device=device, scale=0.05
    )
    plan = case.plan()
    out = poisoned(case.tokens, heads, rank, dtype=case.dtype, device=device)

    def step() -> None:
        plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
        plan.attend(case.query, case.keys, case.keys, out, case.scale)

    step()
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    exact, same = case.reference(torch.float64), case.reference()
    assert relative_error(out, exact) <= 2 * relative_error(same, exact)


@pytest.mark.long
def test_the_kernels_fit_a_hopper_multiprocessor_at_deepseeks_shape() -> None:
    config = MlaChunkConfig()
    chunk = Case(
        "cumulo.kernels.cuda.attention.mla_chunk:_mla_chunk", TYPES,
        dict(HEADS=16, AT_ONCE=16, QUERY_TILE=config.query_tile(16), ROWS=config.rows, RANK=512, ROPE=64, PAGE=64,
             TILE=config.key_tile, HAS_WINDOW=False),
        config.num_warps, config.num_stages,
    )  # fmt: skip
    bf16 = dict.fromkeys(("projected", "compressed", "norm", "cos", "sin", "query", "keys"), "*bf16")
    strides = {f"{name}_stride": "i32:16" for name in ("projected", "compressed", "query", "block")}
    types = (
        bf16 | strides | dict(positions="*i32", slots="*i32", head_dim="i32:16", eps="fp32", block_size="i32")
    )
    cache = Case(
        "cumulo.kernels.cuda.attention.mla_cache:_kernel",
        types,
        dict(HEADS=16, RANK=512, ROPE=64, INTERLEAVED=True),
        1,
    )
    chunk_made, cache_made = compile_for_sm90([chunk, cache])
    cache_made.check_fits()
    # Half of the registers are its sums; the compiler spills some of the others around the loop.
    assert chunk_made.spilled_bytes <= 192 and chunk_made.shared_bytes <= SHARED_BYTES_PER_BLOCK
    assert chunk_made.count("HGMMA") > 0 and chunk_made.count("LDGSTS") > 0

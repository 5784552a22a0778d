"""The overlapped attention kernel: its waits and numbers played on a CPU, its code compiled for Hopper, and the
real thing on one."""

import pytest
import torch

from cumulo.bench.gpu.tune import CHUNK
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_overlap import page_layout
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.paged_case import PagedCase
from tests.kernels.cuda.play_gluon import Player, pages, pointer
from tests.kernels.cuda.tolerance import poisoned, relative_error

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the work list is a kernel, too, and that is not interpreted here"
)


def played(case: PagedCase, rows: int, key_tile: int, slots: int, bundle: int) -> torch.Tensor:
    """The output of a step of chunks."""
    plan = case.plan(chunk=ChunkConfig(rows=rows, key_tile=key_tile), decode_only=False)
    plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
    assert plan.tiles is not None
    out = poisoned(case.tokens, case.heads, case.dim, dtype=case.dtype, device=case.device)
    group = case.heads // case.kv_heads
    Player().run(
        (len(plan.tiles), case.kv_heads), pointer(case.query),
        pages(case.keys, key_tile), pages(case.values, key_tile),
        pointer(out), pointer(plan.tiles), pointer(case.block_tables), case.scale,
        case.query.stride(0), case.query.stride(1), out.stride(0), out.stride(1),
        case.block_tables.stride(0), KV_HEADS=case.kv_heads, GROUP=group, ROWS=rows, QUERY_TILE=rows // group,
        DIM=case.dim, PAGE=case.block_size, TILE=key_tile, SLOTS=slots, BUNDLE=bundle, num_warps=4,
    )  # fmt: skip
    return out


@pytest.mark.long
@on_a_cpu
@pytest.mark.parametrize("slots", [2, 3, 4, 6])
@pytest.mark.parametrize(("heads", "bundle"), [((4, 2), 2), ((3, 1), 4), ((2, 2), 2), ((4, 1), 4)], ids=str)
def test_nothing_is_read_before_it_is_there_or_overwritten_before_it_is_read(
    heads: tuple[int, int], bundle: int, slots: int
) -> None:
    case = PagedCase(
        [(40, 40), (17, 261), (2, 2), (3, 113), (33, 160), (5, 16)], *heads, device=torch.device("cpu")
    )
    assert relative_error(played(case, 16, 16, slots, bundle), case.reference(torch.float64)) < 2e-3


@on_a_cpu
def test_tiles_smaller_than_pages_are_found_in_them() -> None:
    case = PagedCase([(40, 40), (17, 261)], block_size=64, device=torch.device("cpu"))
    assert relative_error(played(case, 32, 16, 4, 2), case.reference(torch.float64)) < 2e-3


def hopper_case(config: ChunkConfig, group: int, dim: int = 128) -> Case:
    types = dict.fromkeys(("query", "out"), "*bf16") | dict.fromkeys(("tiles", "tables"), "*i32")
    described = f"tensordesc<bf16[{config.key_tile},{dim}],{page_layout(config.key_tile, dim)!r}>"
    types |= dict.fromkeys(("keys", "values"), described) | {"scale": "fp32"}
    for name in ("query_token", "query_head", "out_token", "out_head", "table"):
        types[f"{name}_stride"] = "i32:16"
    return Case(
        "cumulo.kernels.cuda.attention.paged_attention_overlap:_chunk_overlapped", types,
        dict(KV_HEADS=8, GROUP=group, ROWS=config.rows, QUERY_TILE=config.query_tile(group), DIM=dim, PAGE=64,
             TILE=config.key_tile, SLOTS=config.num_stages, BUNDLE=config.overlap,
             num_warps=config.num_warps),
        config.num_warps, 1,
    )  # fmt: skip


@pytest.mark.long
def test_products_stay_in_flight_on_hopper() -> None:
    candidates = [config for config in CHUNK if config.overlap]
    made = compile_for_sm90([hopper_case(candidates[0], 4), hopper_case(candidates[0], 2, dim=64)])
    for compiled in made:
        compiled.check_fits()
        assert compiled.count("UTMALDG") > 0
        # Where the compiler gives up overlapping, every product is followed by a wait of its own.
        waits = compiled.sass.count("WARPGROUP.DEPBAR")
        assert 0 < waits < compiled.count("HGMMA") / 2, f"{waits} waits"


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper's instructions",
)
MIXED = [(300, 2000), (64, 64), (2, 129), (1000, 1000), (700, 1111), (5, 3000), (128, 256), (0, 0)]


def real_case(
    sequences: list[tuple[int, int]], heads: int = 32, kv_heads: int = 8, dim: int = 128
) -> PagedCase:
    return PagedCase(
        sequences, heads, kv_heads, dim, block_size=64, dtype=torch.bfloat16, device=torch.device("cuda"),
        scale=dim**-0.5,
    )  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", [config for config in CHUNK if config.overlap], ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (28, 4)], ids=str)
def test_the_overlapped_kernel_matches_on_hopper(heads: tuple[int, int], config: ChunkConfig) -> None:
    real_case(MIXED, *heads).check({"chunk": config})


@pytest.mark.gpu
@needs_hopper
def test_narrow_heads_match_on_hopper() -> None:
    real_case(MIXED, dim=64).check({"chunk": next(config for config in CHUNK if config.overlap)})


@pytest.mark.gpu
@needs_hopper
def test_overlapped_bits_do_not_depend_on_the_chunks_and_repeat() -> None:
    config = next(config for config in CHUNK if config.overlap)
    options = {"invariant": True, "decode_only": False, "chunk": config}
    whole = real_case([(700, 700)])
    expected = whole.run(whole.plan(**options))
    for begin, end in ((0, 1), (0, 200), (200, 333), (333, 700), (699, 700), (0, 700)):
        part = real_case([(end - begin, end)])
        part.keys, part.values, part.block_tables = whole.keys, whole.values, whole.block_tables
        part.query = whole.query[begin:end]
        assert torch.equal(part.run(part.plan(**options)), expected[begin:end])

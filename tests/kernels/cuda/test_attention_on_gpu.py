"""Attention kernels at real sizes: on a GPU in bfloat16, and compiled for Hopper where there is none."""

import pytest
import torch

from cumulo.kernels.cuda.attention.config import chunk_config, decode_config
from cumulo.kernels.cuda.attention.mla_decode import default_config
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from tests.kernels.cuda.compile_sm90 import SHARED_BYTES_PER_BLOCK, Case, compile_for_sm90
from tests.kernels.cuda.paged_case import PagedCase

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes take a GPU")
MIXED = [(1, 3000), (300, 2000), (1, 1), (1, 64), (64, 64), (2, 129), (0, 0), (0, 0)]


def real_case(
    sequences: list[tuple[int, int]], heads: int = 32, kv_heads: int = 8, **more: object
) -> PagedCase:
    settings = {"dim": 128, "block_size": 64, "dtype": torch.bfloat16, "scale": 128**-0.5} | more
    return PagedCase(sequences, heads, kv_heads, device=torch.device("cuda"), **settings)  # type: ignore[arg-type]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (32, 4), (28, 4)], ids=str)
def test_default_configurations_match_at_real_sizes(heads: tuple[int, int]) -> None:
    real_case(MIXED, *heads).check()


@pytest.mark.gpu
@needs_gpu
def test_a_window_matches_at_real_sizes() -> None:
    real_case(MIXED).check(window=200)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "options", [{"dim": 64}, {"dim": 256}, {"block_size": 16}, {"block_size": 128}], ids=str
)
def test_other_head_and_page_sizes_match(options: dict[str, int]) -> None:
    real_case(MIXED, **options).check()


@pytest.mark.gpu
@needs_gpu
def test_an_eight_bit_cache_matches_at_real_sizes() -> None:
    real_case(MIXED, kv_dtype=torch.float8_e4m3fn).check()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_follows_its_buffers_and_repeats_bit_for_bit() -> None:
    case = real_case([(1, 3000), (1, 700), (1, 9), (1, 1300)])
    plan = case.plan()
    lengths, out = case.context_lengths.clone(), torch.empty_like(case.query).contiguous()

    def step() -> None:
        plan.prepare(case.query_starts, case.context_lengths, case.block_tables)
        plan.attend(case.query, case.keys, case.values, out, case.scale)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shorter in (0, 5, 600):
        case.context_lengths.copy_((lengths - shorter).clamp_min(1))
        graph.replay()
        first = out.clone()
        exact = case.reference(torch.float64)
        assert float((first.double() - exact).norm() / exact.norm()) < 5e-3
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)


@pytest.mark.gpu
@needs_gpu
def test_bits_do_not_depend_on_the_batch_on_the_matrix_units() -> None:
    case = real_case([(1, 3000), (90, 300), (1, 17), (1, 1300)])
    options = {"invariant": True, "decode_only": False}
    together = case.run(case.plan(**options))
    for sequence, entry in enumerate(case.sequences):
        alone = real_case([entry])
        rows = slice(*case.query_starts[sequence : sequence + 2].tolist())
        alone.keys, alone.values, alone.query = case.keys, case.values, case.query[rows]
        alone.block_tables = case.block_tables[sequence : sequence + 1]
        assert torch.equal(alone.run(alone.plan(**options)), together[rows])


@pytest.mark.gpu
@needs_gpu
def test_bits_do_not_depend_on_the_chunks_on_the_matrix_units() -> None:
    options = {"invariant": True, "decode_only": False}
    whole = real_case([(700, 700)])
    expected = whole.run(whole.plan(**options))
    for begin, end in ((0, 1), (0, 200), (200, 333), (333, 700), (699, 700)):
        part = real_case([(end - begin, end)])
        part.keys, part.values, part.block_tables = whole.keys, whole.values, whole.block_tables
        part.query = whole.query[begin:end]
        assert torch.equal(part.run(part.plan(**options)), expected[begin:end])


INTEGERS = ("arrivals", "items", "tiles", "tables", "query_starts", "context_lengths")
POINTERS = dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | dict.fromkeys(INTEGERS, "*i32")
POINTERS |= dict.fromkeys(("partial", "partial_lse"), "*fp32")
SCALARS = {"scale": "fp32"}
SCALARS |= dict.fromkeys(("window", "sequences", "max_items", "max_tiles", "min_tiles"), "i32")
STRIDES = {
    f"{name}_stride": "i32:16"
    for name in (
        "query_token", "query_head", "out_token", "out_head", "key_block", "key_head", "key",
        "value_block", "value_head", "value", "table",
    )
}  # fmt: skip
TYPES = POINTERS | SCALARS | STRIDES
PLAIN = {"HAS_WINDOW": False}


def decode_case(config: DecodeConfig, group: int = 4) -> Case:
    at_once = max(1, min(16, config.merge_registers * 32 * config.num_warps // (group * 128)))
    constants = dict(KV_HEADS=8, GROUP=group, ROWS=16, DIM=128, COLUMNS=128, PAGE=64, TILE=config.key_tile,
                     MERGE_ROWS=group, MERGE_AT_ONCE=at_once, **PLAIN)  # fmt: skip
    return Case(
        "cumulo.kernels.cuda.attention.paged_attention_decode:_decode",
        TYPES,
        constants,
        config.num_warps,
        config.num_stages,
    )


def chunk_case(config: ChunkConfig, group: int = 4) -> Case:
    return Case(
        "cumulo.kernels.cuda.attention.paged_attention_chunk:_chunk", TYPES,
        dict(GROUP=group, ROWS=config.rows, QUERY_TILE=config.query_tile(group), DIM=128, COLUMNS=128, PAGE=64,
             TILE=config.key_tile, **PLAIN),
        config.num_warps, config.num_stages,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.long
def test_default_configurations_fit_a_hopper_multiprocessor() -> None:
    few = decode_config(4, 128, torch.bfloat16, 8, 132)
    many = decode_config(4, 128, torch.bfloat16, 512, 132)
    latent = default_config(128)
    work_list = Case(
        "cumulo.kernels.cuda.attention.work_list:_build", TYPES,
        dict(PAGE=64, KEY_TILE=64, QUERY_TILE=32, SEQUENCES=256, HAS_WINDOW=True, DECODES=True,
             CHUNKS=True, CHUNK_FROM=2, FILL=256),
    )  # fmt: skip
    mla = Case(
        "cumulo.kernels.cuda.attention.mla_decode:_mla", TYPES,
        dict(HEADS=128, ROWS=latent.rows, RANK=512, ROPE=64, PAGE=64, TILE=latent.key_tile, HAS_WINDOW=False),
        latent.num_warps, latent.num_stages,
    )  # fmt: skip
    made = compile_for_sm90(
        [
            decode_case(few),
            decode_case(many),
            chunk_case(chunk_config(4, 128, torch.bfloat16, 64, invariant=False)),
            work_list,
            mla,
        ]
    )
    for compiled in made[:-1]:
        compiled.check_fits()
    decode, chunk, latent_made = made[1], made[2], made[-1]
    # Half of the registers are its accumulators; newer compilers spill some of the others around the loop.
    assert latent_made.spilled_bytes <= 128 and latent_made.shared_bytes <= SHARED_BYTES_PER_BLOCK
    assert decode.count("LDGSTS") >= 3 * 16  # three tiles' asynchronous copies: the loop is pipelined
    # Three programs share a multiprocessor: its registers and its shared memory suffice.
    assert decode.registers * 128 * 3 <= 65536 and decode.shared_bytes * 3 <= 227 << 10
    assert chunk.count("HGMMA") > 0 and chunk.count("LDGSTS") > 0
    assert latent_made.count("HGMMA") > 0

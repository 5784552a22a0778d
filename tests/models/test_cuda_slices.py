"""The GPU decoder on slices of a model: ranks in processes of their own, each with its part of the heads, of the
feed-forward and of the vocabulary, give the logits and draw the tokens of the whole. They read each other's memory.
Without a GPU Triton's interpreter plays the kernels.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

# Asked without starting CUDA: the ranks are forked from a process that has imported this file.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from torch.distributed.distributed_c10d import _get_default_store  # noqa: E402
from triton import next_power_of_2  # noqa: E402

from cumulo.kernels.cuda.linear import linear, small_linear  # noqa: E402
from cumulo.kernels.cuda.linear.small_linear import SmallConfig  # noqa: E402
from cumulo.kernels.cuda.sampling.sample import (  # noqa: E402
    COLUMNS,
    POSITION,
    TEMPERATURE,
    SampleBuffers,
    sample,
)
from cumulo.layout.serving import RankPart, ServingLayout, held_parameters, rank_part  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors  # noqa: E402
from cumulo.models.play.cuda_slice import RankSlice, shared_bytes  # noqa: E402
from cumulo.models.play.rank_decoder import empty_rank_decoder  # noqa: E402
from cumulo.ranks.peer_memory import peer_memory  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec  # noqa: E402
from tests.thorough import rare  # noqa: E402

pytestmark = pytest.mark.long
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
BASE = dict(
    family="tiny", vocab_size=38, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_hidden=32,
    max_context=64,
)  # fmt: skip
SPECS = {
    "biases": ModelSpec(**BASE, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True),
    "latent experts": ModelSpec(
        **BASE, mla=MLASpec(24, kv_rank=16, nope_head_dim=8, rope_head_dim=16, value_head_dim=16),
        moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16, shared_hidden=16, dense_layers=(0,)),
    ),
    "wide": ModelSpec(**BASE | dict(ffn_hidden=128), output_bias=True, mlp_bias=True),
    "experts": ModelSpec(**BASE, moe=MoESpec(experts=4, experts_per_token=3, expert_hidden=16)),
    "shared expert": ModelSpec(
        **BASE | dict(ffn_hidden=64, layers=3), qk_norm=True,
        moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16, shared_hidden=64, dense_layers=(0,)),
    ),
    "eight heads": ModelSpec(**BASE | dict(vocab_size=40, heads=8, head_dim=32, ffn_hidden=256)),
}  # fmt: skip


def few_programs(n: int, k: int, *_: object) -> SmallConfig:
    """An interpreted program takes milliseconds, however large."""
    return SmallConfig(64, next_power_of_2(k), 4)


def one_small_row(*_: object) -> linear.Choice:
    return linear.Choice("small")


def make_decoder(spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * random if parameter.dim() > 1 else 1 + 0.3 * random
    return decoder.to(DEVICE)


def cut(whole: Decoder, part: RankPart) -> Decoder:
    """A rank's decoder."""
    decoder = empty_rank_decoder(part, torch.float32, DEVICE)
    held = held_parameters(part)
    for name, parameter in decoder.named_parameters():
        given = whole.get_parameter(held[name].source)
        for box in held[name].boxes:
            parameter.data[box.held_slices] = given[box.whole_slices]
    return decoder


def steps(model: CudaDecoder) -> tuple[Tensor, Tensor]:
    """The logits of a chunk's last tokens, then of the token after it, and what is drawn from them: greedily, and
    at a temperature. Before them a chunk in the middle of a prompt, which draws nothing."""
    cache = KVCache(model.spec, 4, 16, torch.float32, DEVICE)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=DEVICE)
    buffers = SampleBuffers(2, model.vocab_size, DEVICE)
    found, drawn = [], []

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def step(first: int, tokens: list[int], wanted: list[int]) -> None:
        positions = torch.arange(first, first + len(tokens), dtype=torch.int32, device=DEVICE)
        slots = table[0, positions.long() // 16] * 16 + positions % 16
        attention = model.attention_plan(len(tokens), 1, len(tokens) == 1, cache, 3, None)
        attention.prepare(ints([0, len(tokens)]), ints([first + len(tokens)]), table)
        logits = model.forward(StepTensors(ints(tokens), positions, slots, ints(wanted), attention), cache)
        draws = torch.zeros((len(wanted), COLUMNS), dtype=torch.int32, device=DEVICE)
        draws[:, POSITION] = torch.arange(len(wanted), device=DEVICE)
        draws[1:, TEMPERATURE] = torch.ones(len(draws[1:]), device=DEVICE).view(torch.int32)
        picked, history = ints([-1] * len(wanted)), torch.zeros((1, 4), dtype=torch.int32, device=DEVICE)
        if model.slice is None:
            sample(logits, draws, buffers, picked, history)
        else:
            model.slice.draw(len(wanted), draws, picked, history)
        drawn.append(picked)
        found.append(model.whole_logits(len(wanted)).clone())

    step(0, list(range(3, 9)), [])
    step(6, list(range(9, 21)), [10, 11])
    step(18, [5], [0])
    return torch.cat(found).cpu(), torch.cat(drawn).cpu()


def largest_of_all(own: Tensor) -> Tensor:
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX)
    return own


def play_rank(
    rank: int, name: str, ranks: int, ep: int, invariant: bool = False, weights: str = "auto"
) -> tuple[Tensor, Tensor]:
    if not HAS_GPU:
        small_linear.default_config, linear._one_row = few_programs, one_small_row
    part = rank_part(SPECS[name], ServingLayout(tp=ranks, ep=ep), rank)
    own = cut(make_decoder(SPECS[name]), part)
    size = shared_bytes(own.spec, 32, 2, torch.float32, ranks, invariant)
    memory = peer_memory(size, _get_default_store(), "slices", rank, ranks, DEVICE)
    own_slice = RankSlice(memory, part, 32, 2, torch.float32, invariant)
    model = CudaDecoder(
        own, 32, 2, weights=weights, rank_slice=own_slice, batch_invariant=invariant, sum_parts=max(4, ranks),
        largest=largest_of_all,
    )  # fmt: skip
    return steps(model)


@pytest.mark.parametrize(("name", "ep"), [("latent experts", 2), *rare(("biases", 1), ("latent experts", 1))])
def test_two_slices_give_the_logits_and_tokens_of_the_whole_model(
    name: str, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(small_linear, "default_config", few_programs)
        monkeypatch.setattr(linear, "_one_row", one_small_row)
    expected, drawn = steps(CudaDecoder(make_decoder(SPECS[name]), 32, 2))
    found = run_ranks(play_rank, 2, name, 2, ep, timeout_s=600)
    for logits, tokens in found:
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        assert tokens.equal(drawn)
    assert found[0][0].equal(found[1][0])  # bit by bit: ranks that differ drift apart


@pytest.mark.parametrize(
    ("name", "ranks", "ep", "weights"),
    [
        ("wide", 2, 1, "fp8"),
        ("shared expert", 2, 2, "auto"),
        *rare(
            ("wide", 2, 1, "auto"),
            ("experts", 2, 2, "auto"),
            ("eight heads", 4, 1, "auto"),
            ("eight heads", 8, 1, "fp8"),
        ),
    ],
)
def test_in_the_batch_invariant_mode_slices_have_the_bits_of_the_whole_model(
    name: str, ranks: int, ep: int, weights: str
) -> None:
    whole = CudaDecoder(
        make_decoder(SPECS[name]), 32, 2, weights=weights, batch_invariant=True, sum_parts=max(4, ranks)
    )
    expected, drawn = steps(whole)
    for logits, tokens in run_ranks(play_rank, ranks, name, ranks, ep, True, weights, timeout_s=600):
        assert logits.equal(expected) and tokens.equal(drawn)

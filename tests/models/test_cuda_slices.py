"""The GPU decoder on slices of a model: two ranks, each with half of the heads and of the feed-forward, give the
logits of the whole. Without a GPU Triton's interpreter plays the kernels.

The weights are cut as tensor-parallel training cuts them. The ranks are threads that take turns: each computes
until its partial sum is due, and the second adds both up.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton import next_power_of_2  # noqa: E402

from cumulo.kernels.cuda.linear import small_linear  # noqa: E402
from cumulo.kernels.cuda.linear.small_linear import SmallConfig  # noqa: E402
from cumulo.layout.layout import Layout  # noqa: E402
from cumulo.layout.pieces import piece_of  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors  # noqa: E402
from cumulo.models.play.cuda_weights import RankSlice  # noqa: E402
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec  # noqa: E402

pytestmark = pytest.mark.slow
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BASE = dict(
    family="tiny", vocab_size=37, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_hidden=32,
    max_context=64,
)  # fmt: skip
SPECS = {
    "biases": ModelSpec(**BASE, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True),
    "latent experts": ModelSpec(
        **BASE, mla=MLASpec(24, kv_rank=16, nope_head_dim=8, rope_head_dim=16, value_head_dim=16),
        moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16, shared_hidden=16, dense_layers=(0,)),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes milliseconds, however large."""
    if not HAS_GPU:
        monkeypatch.setattr(
            small_linear, "default_config", lambda n, k, *_: SmallConfig(64, next_power_of_2(k), 4)
        )


def make_decoder(spec: ModelSpec) -> Decoder:
    decoder = Decoder(spec, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * random if parameter.dim() > 1 else 1 + 0.3 * random
    return decoder.to(DEVICE)


def cut(whole: Decoder, rank: int, ranks: int) -> Decoder:
    """A rank's decoder; embedding and head stay whole."""
    spec, moe = whole.spec, whole.spec.moe
    if moe is not None:
        moe = replace(moe, expert_hidden=moe.expert_hidden // ranks, shared_hidden=moe.shared_hidden // ranks)
    own = replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=spec.kv_heads // ranks,
        ffn_hidden=spec.ffn_hidden // ranks,
        moe=moe,
    )
    decoder = Decoder(own, torch.float32, DEVICE)
    for name, parameter in decoder.named_parameters():
        given = whole.get_parameter(name)
        if name in ("embed.weight", "head.weight"):
            parameter.data.copy_(given)
            continue
        for box in piece_of(spec, Layout(tp=ranks), rank, name, tuple(given.shape)).boxes:
            parameter.data[box.held_slices] = given[box.whole_slices]
    return decoder


class Turns:
    """Two ranks that run alternately, so that kernels are never played by two threads at once."""

    def __init__(self) -> None:
        self.turn = [threading.Semaphore(1), threading.Semaphore(0)]
        self.waiting: Tensor | None = None
        self.sums = 0

    def sum_over_ranks(self, rank: int, stream: Tensor) -> None:
        if rank == 0:
            self.waiting = stream
            self.turn[1].release()
            assert self.turn[0].acquire(timeout=60)
            return
        assert self.waiting is not None and self.waiting.shape == stream.shape
        stream += self.waiting
        self.waiting.copy_(stream)
        self.sums += 1
        self.turn[0].release()
        assert self.turn[1].acquire(timeout=60)

    def run(self, functions: list[Callable[[], Tensor]]) -> list[Tensor]:
        results: dict[int, Tensor] = {}

        def play(rank: int) -> None:
            assert self.turn[rank].acquire(timeout=60)
            results[rank] = functions[rank]()
            self.turn[1 - rank].release()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(2)]


def two_steps(model: CudaDecoder) -> Tensor:
    """The logits of a chunk's last tokens, then of the token after it."""
    cache = KVCache(model.spec, 4, 16, torch.float32, DEVICE)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=DEVICE)

    def step(first: int, tokens: list[int], wanted: list[int]) -> Tensor:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        positions = torch.arange(first, first + len(tokens), dtype=torch.int32, device=DEVICE)
        slots = table[0, positions.long() // 16] * 16 + positions % 16
        attention = model.attention_plan(len(tokens), 1, len(tokens) == 1, cache, 3, None)
        attention.prepare(ints([0, len(tokens)]), ints([first + len(tokens)]), table)
        batch = StepTensors(ints(tokens), positions, slots, ints(wanted), attention)
        return model.forward(batch, cache).clone()

    return torch.cat((step(0, list(range(3, 21)), [16, 17]), step(18, [5], [0])))


@pytest.mark.parametrize("name", list(SPECS))
def test_the_partial_sums_of_two_slices_make_the_whole_models_logits(name: str) -> None:
    whole = make_decoder(SPECS[name])
    expected = two_steps(CudaDecoder(whole, 32, 2))
    turns = Turns()
    models = [
        CudaDecoder(
            cut(whole, rank, 2),
            32,
            2,
            rank_slice=RankSlice(rank == 0, lambda stream, rank=rank: turns.sum_over_ranks(rank, stream)),
        )
        for rank in range(2)
    ]
    assert max(model.mixed.shape[1] for model in models) * 2 == CudaDecoder(whole, 32, 2).mixed.shape[1]
    for found in turns.run([lambda model=model: two_steps(model) for model in models]):
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert turns.sums == 2 * 2 * SPECS[name].layers  # one a half-layer

"""Optimizers and schedules against torch's own and against what the papers say."""

import math

import pytest
import torch
from torch import nn

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig, ScheduleConfig
from cumulo.train.decide.schedule import learning_rate_share
from cumulo.train.optimizer.muon import Muon, MuonMatrix, orthogonalise
from cumulo.train.optimizer.optimizer import Optimizer, fused_parts
from cumulo.train.optimizer.sharded_optimizer import OneRank

SPEC = ModelSpec("llama", 32, 16, 1, 4, 2, 4, 24, 64)


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (3, 16, 16)])
def test_orthogonalising_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalise(matrix(*shape), torch.float32))
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_muon_moves_a_matrix_as_torchs_muon_does(shape: tuple[int, int]) -> None:
    ours = nn.Parameter(matrix(*shape))
    theirs = nn.Parameter(matrix(*shape))
    peer = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1)
    config = OptimizerConfig(muon_learning_rate=0.02, muon_momentum=0.95, weight_decay=0.1)
    muon = Muon({"ours": MuonMatrix(ours, torch.zeros_like(ours), (shape[0],))}, config)
    for step in range(4):
        ours.grad = matrix(*shape, seed=step + 1)
        theirs.grad = ours.grad.clone()
        muon.step(1.0)
        peer.step()
    moved = (ours - matrix(*shape)).abs().max()
    # torch iterates in bfloat16: what remains is its rounding
    assert (ours - theirs).abs().max() < 0.05 * moved


def test_fused_matrices_are_made_orthogonal_one_by_one() -> None:
    fused = nn.Parameter(torch.zeros(32, 16))
    parts = fused_parts("layers.0.attention.qkv.weight", SPEC, fused.shape)
    assert parts == (16, 8, 8)
    fused.grad = matrix(32, 16)
    config = OptimizerConfig(muon_learning_rate=1.0, muon_momentum=0.95, weight_decay=0.0)
    Muon({"fused": MuonMatrix(fused, torch.zeros_like(fused), parts)}, config).step(1.0)
    for part, gradient in zip(fused.detach().split(parts), matrix(32, 16).split(parts), strict=True):
        alone = nn.Parameter(torch.zeros_like(part))
        alone.grad = gradient
        Muon({"alone": MuonMatrix(alone, torch.zeros_like(alone), (len(part),))}, config).step(1.0)
        torch.testing.assert_close(part, alone.detach())


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    shapes = {"embed.weight": (32, 16), "layers.0.ffn.down.weight": (16, 24), "final_norm.weight": (16,)}
    return {name: nn.Parameter(matrix(*shape).to(dtype)) for name, shape in shapes.items()}


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def test_adamw_decays_matrices_only_and_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(learning_rate=0.01, clip_norm=0)
    optimizer = Optimizer(ours, config, SPEC, master_weights=True)
    groups = [
        {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        for name in ours:
            ours[name].grad = matrix(*ours[name].shape, seed=step + 1)
            theirs[name].grad = matrix(*ours[name].shape, seed=step + 1)
        optimizer.take_gradients(gradients(ours))
        optimizer.step(1.0)
        peer.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masters", [False, True])
def test_master_weights_keep_steps_that_bfloat16_would_lose(masters: bool) -> None:
    half = {"final_norm.weight": nn.Parameter(torch.ones(8, dtype=torch.bfloat16))}
    config = OptimizerConfig(learning_rate=1e-4, clip_norm=0)
    optimizer = Optimizer(half, config, SPEC, masters)
    for _ in range(200):
        half["final_norm.weight"].grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.take_gradients(gradients(half))
        optimizer.step(1.0)
        optimizer.zero_grad()
    moved = 1 - half["final_norm.weight"].float()
    # 200 steps of 1e-4; the smallest change of a bfloat16 near 1 is 39 of them
    assert bool((moved > 0.015).all()) == masters
    assert ("final_norm.weight.master" in optimizer.state()) == masters


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    half = {"final_norm.weight": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}
    held = pieces(SPEC, Layout(), 0, {"final_norm.weight": (1,)})
    sink = OneRank({0: half}, held, wide_gradients=True, offload=False)
    sink.begin()
    for value in (256.0, 1.0, 1.0):
        half["final_norm.weight"].grad = torch.full((1,), value, dtype=torch.bfloat16)
        sink.added(0)
    assert float(sink.finish()["final_norm.weight"]) == 258.0  # bfloat16 would have stayed at 256


def test_clipping_brings_the_joint_norm_down() -> None:
    own = parameters()
    optimizer = Optimizer(own, OptimizerConfig(clip_norm=1.0), SPEC, master_weights=False)
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    expected = math.sqrt(sum(p.numel() for p in own.values()))
    assert math.isclose(float(optimizer.clip()), expected, rel_tol=1e-5)
    after = math.sqrt(sum(float((p.grad**2).sum()) for p in own.values() if p.grad is not None))
    assert math.isclose(after, 1.0, rel_tol=1e-4)


def test_the_schedules_go_up_and_end_where_they_should() -> None:
    cosine = ScheduleConfig("cosine", warmup_steps=10, final_share=0.1)
    shares = [learning_rate_share(cosine, step, 100) for step in range(100)]
    assert shares[:11] == sorted(shares[:11])
    assert shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert 0.1 < shares[-1] < 0.101
    assert math.isclose(learning_rate_share(cosine, 55, 100), 0.55)  # half way down
    stable = ScheduleConfig("wsd", warmup_steps=10, decay_share=0.2, final_share=0.0)
    shares = [learning_rate_share(stable, step, 100) for step in range(100)]
    assert shares[10:80] == [1.0] * 70
    assert 0.4 < shares[90] < 0.5
    assert math.isclose(shares[-1], 1 / 21)  # a step at a share of 0 would change nothing
    assert learning_rate_share(ScheduleConfig("constant", warmup_steps=0), 99, 100) == 1.0

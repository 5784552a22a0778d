"""One batch through a model that is split as a layout says, beside the same batch through the whole model: what the
tests of splits compare. Everything in float64, in the processes of `tests.train.pool`."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import Piece, pieces
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.data.packing import IGNORED, Batch, to_device
from cumulo.train.model.model import TrainingDecoder, seeded_normal
from cumulo.train.model.split import split_for
from tests.train.pool import run_ranks

DENSE = ModelSpec(
    "dense", vocab_size=48, hidden=24, layers=2, heads=8, kv_heads=4, head_dim=4, ffn_hidden=40, max_context=64,
    qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
TIED = replace(DENSE, tied_embeddings=True, sliding_window=5, windowed_layers=(1,), qk_norm=False)
SPARSE = replace(
    DENSE, layers=3,
    moe=MoESpec(experts=8, experts_per_token=3, expert_hidden=12, shared_hidden=8, dense_layers=(0,)),
)  # fmt: skip
LATENT = ModelSpec(
    "latent", vocab_size=48, hidden=24, layers=2, heads=8, kv_heads=8, head_dim=8, ffn_hidden=40, max_context=64,
    rope_interleaved=True, mla=MLASpec(q_rank=10, kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=6),
    moe=MoESpec(
        experts=8, experts_per_token=2, expert_hidden=12, shared_hidden=12, scoring="sigmoid", groups=4,
        top_groups=2, group_score="top2sum", selection_bias=True, dense_layers=(0,), routed_scale=1.5,
    ),
)  # fmt: skip

BALANCE_WEIGHT = 0.7  # large, so that a wrong gradient shows


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    layout: Layout
    documents: tuple[tuple[int, ...], ...]  # lengths in each row; all rows equally long
    options: dict[str, Any] = field(default_factory=dict)  # of TrainingDecoder


def rows(count: int, length: int, documents: int) -> tuple[tuple[int, ...], ...]:
    """Rows of this many documents each, cut in other places in every row."""
    random = np.random.default_rng([count, length, documents])
    cuts = [np.sort(random.choice(np.arange(1, length), documents - 1, replace=False)) for _ in range(count)]
    return tuple(tuple(np.diff([0, *cut, length]).tolist()) for cut in cuts)


def make_batch(spec: ModelSpec, documents: tuple[tuple[int, ...], ...]) -> Batch:
    length = sum(documents[0])
    random = np.random.default_rng(len(documents) * 1000 + length)
    tokens = random.integers(0, spec.vocab_size, (len(documents), length))
    targets = random.integers(0, spec.vocab_size, (len(documents), length))
    targets[random.random(targets.shape) < 0.2] = IGNORED
    positions = np.stack([np.concatenate([np.arange(size) for size in row]) for row in documents])
    starts = np.cumsum([0, *(size for row in documents for size in row)]).astype(np.int32)
    return Batch(tokens, targets, positions, starts, int((targets != IGNORED).sum()))


@torch.no_grad()
def fill(name: str, parameter: Tensor) -> None:
    """Numbers of everyday size, unlike a first step's: a forgotten term shows."""
    noise = seeded_normal(name, parameter, 5).to(parameter.dtype)
    scale = 0.3 if parameter.ndim > 1 else 0.2
    parameter.copy_(noise * scale + (1.0 if name.endswith("norm.weight") else 0.0))


def whole_model(spec: ModelSpec) -> TrainingDecoder:
    model = TrainingDecoder(spec, torch.float64)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    return model


@torch.no_grad()
def cut(whole: Tensor, piece: Piece) -> Tensor:
    part = whole.new_full(piece.shape, torch.nan)
    for box in piece.boxes:
        part[box.held_slices] = whole[box.whole_slices]
    return part


def objective(model: TrainingDecoder, batch: Batch, loss_tokens: int, all_rows: int) -> Tensor:
    losses = model(to_device(batch, torch.device("cpu")))
    value = losses.token_sum / loss_tokens
    return value if losses.balance_sum is None else value + losses.balance_sum * (BALANCE_WEIGHT / all_rows)


def differences(rank: int, case: Case) -> dict[str, float]:
    """Of a rank of the layout: how far loss and gradients are from the whole model's, each in units of its size."""
    layout = case.layout
    batch = make_batch(case.spec, case.documents)
    count = len(case.documents)
    whole = whole_model(case.spec)
    expected = objective(whole, batch, batch.loss_tokens, count)
    expected.backward()

    groups = Groups(layout, rank)
    model = TrainingDecoder(case.spec, torch.float64, split=split_for(layout, groups), **case.options)
    held = pieces(case.spec, layout, rank)
    originals = dict(whole.named_parameters())
    own = dict(model.named_parameters())
    if set(own) != set(held):
        raise AssertionError(
            f"parameters {set(own) ^ set(held)} are in the model or in the pieces, not in both"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(cut(originals[name], held[name]))
    per_rank = count // layout.dp
    first = layout.place(rank).dp * per_rank
    loss = objective(model, batch.rows(first, first + per_rank), batch.loss_tokens, count)
    loss.backward()
    total, expected = loss.detach().clone(), expected.detach()
    all_reduce(total, groups.group_of_several("data"))
    found = {"loss": float((total - expected).abs() / expected.abs())}
    largest = max(
        float(original.grad.abs().max()) for original in originals.values() if original.grad is not None
    )
    for name, parameter in own.items():
        gradient, wanted = parameter.grad, originals[name].grad
        if gradient is None or wanted is None:
            found[name] = 0.0 if gradient is None and wanted is None else float("inf")
            continue
        piece = held[name]
        if piece.partial_over_tp:
            all_reduce(gradient, groups.group("tp"))
        axis = "expert_data" if piece.expert else "data"
        all_reduce(gradient, groups.group_of_several(axis))
        scale = wanted.abs().max().clamp(min=1e-6 * largest)  # some are zero but for rounding
        found[name] = float((gradient - cut(wanted, piece)).abs().max() / scale)
    return found


def check(case: Case, tolerance: float = 1e-12) -> None:
    for rank, found in enumerate(run_ranks(differences, case.layout.world, case)):
        wrong = {name: error for name, error in found.items() if not error <= tolerance}
        if wrong:
            raise AssertionError(f"rank {rank} of {case.layout}: relative errors {wrong}")

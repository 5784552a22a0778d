"""Whether a layout computes what one process computes: both are run in float64 on the CPU and compared.
`cumulo train --verify-layout` and the tests call it.

    verdict = verify_layout(config)        # of the user's configuration, made small
    verdict.difference                     # the largest relative difference of losses, norms and weights
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import Box
from cumulo.models.files.load import inspect_model
from cumulo.ranks.groups import Groups
from cumulo.ranks.start import run_ranks
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import IGNORED, Batch, to_device
from cumulo.train.decide.config import TrainConfig, check_layout, new_spec
from cumulo.train.decide.shrink import shrink
from cumulo.train.model.lora import adapt
from cumulo.train.model.model import TrainingDecoder, initialise, seeded_normal
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.parallel.expert_balance import steer_selection_biases
from cumulo.train.run.model_run import ModelRun, StepLoss

TOLERANCE = 1e-9  # float64 rounding, after 20 steps, is a thousandth of it


@dataclass(frozen=True, slots=True)
class Verdict:
    layout: Layout  # that was run: the configuration's, with fewer ranks if it has many
    spec: ModelSpec  # that was run
    steps: int
    difference: float  # the largest relative one
    where: str
    losses: tuple[float, ...]  # of one process

    @property
    def same(self) -> bool:
        return self.difference <= TOLERANCE


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A run's numbers: of each step, and the weights at the end."""

    losses: list[float]
    balances: list[float]
    norms: list[float]
    weights: dict[str, tuple[tuple[Box, ...], Tensor]]  # parts of parameters, by name


def verify_layout(config: TrainConfig, steps: int = 20) -> Verdict:
    """Run the configuration's kind of model alone and under its layout; raises what a rank raises."""
    if config.model.start_from is not None:
        spec = inspect_model(config.model.start_from).spec
    else:
        spec = new_spec(config, config.layout.tp, ())  # any vocabulary that can be cut
    check_layout(config, spec)
    small = shrink(config, spec, steps)
    check_layout(small.config, small.spec)
    alone = train_alone(small.spec, small.config)
    ranks = run_ranks(train_rank, small.config.layout.world, small.spec, small.config, timeout_s=None)
    difference, where = largest_difference(alone, ranks)
    return Verdict(small.config.layout, small.spec, steps, difference, where, tuple(alone.losses))


# -- the two runs ----------------------------------------------------------------------------------------------
def train_alone(spec: ModelSpec, config: TrainConfig) -> Outcome:
    """A plain loop over the whole model: what every layout, that of one rank included, is held against."""
    model = TrainingDecoder(spec, torch.float64)
    model.load_state_dict(start_weights(spec, config.seed))
    if config.lora is not None:
        adapt(model, config.lora, config.seed)
    optimizer = Optimizer(dict(model.named_parameters()), config.optimizer, spec, config.master_weights)
    outcome = Outcome([], [], [], {})
    for step in range(config.steps):
        batch = random_batch(spec, config, step)
        loss = plain_gradients(model, optimizer, batch, config.micro_batch, config.balance_loss)
        outcome.losses.append(loss.loss)
        outcome.balances.append(loss.balance)
        outcome.norms.append(float(optimizer.clip()))
        optimizer.step(1.0)
        if config.expert_bias_rate:
            steer_selection_biases([model], config.expert_bias_rate, None)
        optimizer.zero_grad()
    outcome.weights.update({name: ((), p.detach()) for name, p in model.named_parameters()})
    return outcome


def plain_gradients(
    model: TrainingDecoder, optimizer: Optimizer, batch: Batch, micro_batch: int, balance_weight: float
) -> StepLoss:
    """Leave the gradients of the whole batch's mean loss with the optimizer, by autograd alone."""
    rows, loss_tokens = len(batch.tokens), max(1, batch.loss_tokens)
    device = next(model.parameters()).device
    token_sum, balance_sum = torch.zeros(2, dtype=torch.float64, device=device)
    for first in range(0, rows, micro_batch):
        losses = model(to_device(batch.rows(first, first + micro_batch), device))
        objective = losses.token_sum / loss_tokens
        token_sum += losses.token_sum.detach()
        if losses.balance_sum is not None:
            balance_sum += losses.balance_sum.detach()
            objective = objective + losses.balance_sum * (balance_weight / rows)
        objective.backward()
    named = optimizer.parameters.items()
    optimizer.take_gradients({name: p.grad for name, p in named if p.grad is not None})
    return StepLoss(float(token_sum) / loss_tokens, float(balance_sum) / rows)


def train_rank(rank: int, spec: ModelSpec, config: TrainConfig) -> Outcome:
    """One rank's part of the same, in a process where torch.distributed is ready."""
    start = start_weights(spec, config.seed)
    run = ModelRun(spec, config, Groups(config.layout, rank), torch.device("cpu"), start)
    outcome = Outcome([], [], [], {})
    rows = config.batch_sequences // config.layout.dp
    first = run.groups.place.dp * rows
    for step in range(config.steps):
        batch = random_batch(spec, config, step)
        loss = run.gradients(batch.rows(first, first + rows), batch.loss_tokens)
        outcome.losses.append(loss.loss)
        outcome.balances.append(loss.balance)
        outcome.norms.append(run.clip())
        run.step(1.0)
    for name, shard in run.shards.items():
        boxes = shard.piece.cut_rows(shard.begin, shard.end)
        outcome.weights[name] = boxes, shard.tensor.detach().clone()
    return outcome


def start_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Larger than a new model's, and no bias or norm is trivial: everything matters from the first step on."""
    weights = {
        name: torch.empty(shape, dtype=torch.float64) for name, shape in parameter_shapes(spec).items()
    }
    initialise(weights, spec, seed)
    for name, weight in weights.items():
        noise = seeded_normal(f"noise {name}", weight, seed).double()
        weights[name] = 10 * weight if weight.ndim > 1 else weight + 0.1 * noise
    return weights


def random_batch(spec: ModelSpec, config: TrainConfig, step: int) -> Batch:
    """Random rows of three documents each; a document's last token has no target."""
    rows, length = config.batch_sequences, config.data.sequence_length
    random = np.random.default_rng([config.seed, step])
    tokens = random.integers(0, spec.vocab_size, (rows, length))
    positions = np.empty((rows, length), dtype=np.int64)
    targets = np.roll(tokens, -1, axis=1)
    starts: list[int] = []
    for row in range(rows):
        cuts = sorted(random.choice(np.arange(1, length), 2, replace=False).tolist())
        for begin, end in pairwise([0, *cuts, length]):
            positions[row, begin:end] = np.arange(end - begin)
            targets[row, end - 1] = IGNORED
            starts.append(row * length + begin)
    document_starts = np.array([*starts, rows * length], dtype=np.int32)
    return Batch(tokens, targets, positions, document_starts, int(np.count_nonzero(targets != IGNORED)))


# -- comparing -------------------------------------------------------------------------------------------------
def largest_difference(alone: Outcome, ranks: Sequence[Outcome]) -> tuple[float, str]:
    """The largest relative difference on any rank, and where it is. Weights are held against the largest of their
    tensor; infinity where no rank has a part of a parameter."""
    found: list[tuple[float, str]] = [(0.0, "nowhere")]
    missing = {name: torch.ones_like(whole, dtype=torch.bool) for name, (_, whole) in alone.weights.items()}
    for rank, own in enumerate(ranks):
        for what in ("losses", "balances", "norms"):
            pairs = zip(getattr(own, what), getattr(alone, what), strict=True)
            for step, (number, expected) in enumerate(pairs):
                relative = _relative(abs(number - expected), abs(expected))
                found.append((relative, f"rank {rank}: {what} of step {step + 1}"))
        for name, (boxes, part) in own.weights.items():
            whole = alone.weights[name][1]
            for box in boxes:
                difference = float((part[box.held_slices] - whole[box.whole_slices]).abs().max())
                found.append((_relative(difference, float(whole.abs().max())), f"rank {rank}: {name}"))
                missing[name][box.whole_slices] = False
    found += [(float("inf"), f"no rank has all of {name}") for name, where in missing.items() if where.any()]
    return max(found)


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if math.isfinite(difference) and size else math.inf

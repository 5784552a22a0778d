"""A tiny model's steps in one process and over data-parallel ranks, for the tests of gradient sinks."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.pipeline.play.deferred import DeferredWeights
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.data.packing import Batch, DeviceBatch, to_device
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.model.model import TrainingDecoder, initialise
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer, gradient_sink
from tests import thorough

DENSE = ModelSpec("llama", 37, 16, 2, 4, 2, 4, 24, 64)
EXPERTS = ModelSpec("mixtral", 37, 16, 2, 4, 2, 4, 24, 64, moe=MoESpec(6, 2, 12))
ROWS, LENGTH = 8, 12


@dataclass(frozen=True)
class Case:
    spec: ModelSpec = DENSE
    # So small a norm that clipping matters.
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=0.01, clip_norm=0.05)
    )
    dtype: torch.dtype = torch.float64
    steps: int = field(default_factory=lambda: 4 if thorough.chosen else 3)
    micro_batches: int = 2  # of a rank
    in_halves: bool = False  # weights' gradients after and apart from the input's
    recompute: bool | tuple[str, ...] = False

    def model(self) -> TrainingDecoder:
        model = TrainingDecoder(self.spec, self.dtype, recompute=self.recompute)
        initialise(dict(model.named_parameters()), self.spec, seed=3)
        return model

    def rows(self, step: int, first: int, last: int) -> DeviceBatch:
        """Rows of a step's batch of random tokens, one document each."""
        drawn = np.random.default_rng(step).integers(0, self.spec.vocab_size, (ROWS, LENGTH + 1))
        tokens, targets = drawn[first:last, :-1].copy(), drawn[first:last, 1:].copy()
        positions = np.broadcast_to(np.arange(LENGTH), tokens.shape).copy()
        starts = (np.arange(len(tokens) + 1) * LENGTH).astype(np.int32)
        return to_device(Batch(tokens, targets, positions, starts, tokens.size), torch.device("cpu"))

    def objective(self, model: TrainingDecoder, step: int, first: int, last: int) -> Tensor:
        losses = model(self.rows(step, first, last))
        objective: Tensor = losses.token_sum / (ROWS * LENGTH)
        return objective if losses.balance_sum is None else objective + losses.balance_sum / ROWS


@dataclass(frozen=True)
class Outcome:
    norms: list[float]  # of the steps' gradients
    weights: dict[str, Tensor]  # after all steps
    state: dict[str, Tensor]  # the optimizer's: this rank's rows
    rows: dict[str, tuple[int, int]]  # which they are


def alone(case: Case) -> Outcome:
    """One process with all rows, in micro-batches of as many as a rank's."""
    model = case.model()
    optimizer = Optimizer(dict(model.named_parameters()), case.optimizer, case.spec, master_weights=True)
    norms = []
    for step in range(case.steps):
        part = ROWS // case.micro_batches
        sums: dict[str, Tensor] = {}
        for first in range(0, ROWS, part):
            case.objective(model, step, first, first + part).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                wide = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                sums[name] = sums[name] + wide if name in sums else wide
                parameter.grad = None
        optimizer.take_gradients(sums)
        norms.append(float(optimizer.clip()))
        optimizer.step(1.0)
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    rows = {name: (0, len(weight)) for name, weight in weights.items()}
    return Outcome(norms, weights, optimizer.state(), rows)


def together(rank: int, layout: Layout, case: Case) -> Outcome:
    """The same from a rank that has only its rows."""
    groups = Groups(layout, rank)
    model = case.model()
    sink = gradient_sink({0: model}, pieces(case.spec, layout, rank), groups, wide_gradients=True)
    optimizer = ShardedOptimizer(sink, case.optimizer, case.spec, True, groups)
    own = ROWS // layout.dp
    part = own // case.micro_batches
    norms = []
    for step in range(case.steps):
        sink.begin()
        begins = [groups.index("dp") * own + number * part for number in range(case.micro_batches)]
        for begin in begins:
            is_last = begin == begins[-1]
            if case.in_halves:
                with DeferredWeights() as later:
                    objective = case.objective(model, step, begin, begin + part)
                later.input_gradient([objective], [None], None, sink.leaves(0))
                sink.last(0) if is_last else None
                later.accumulate()
            else:
                objective = case.objective(model, step, begin, begin + part)
                sink.last(0) if is_last else None
                objective.backward()
        optimizer.take_gradients(sink.finish())
        norms.append(float(optimizer.clip()))
        optimizer.step(1.0)
        optimizer.zero_grad()
    weights = {name: _whole(parameter).clone() for name, parameter in model.named_parameters()}
    rows = {name: (shard.begin, shard.end) for name, shard in sink.shards.items()}
    return Outcome(norms, weights, optimizer.state(), rows)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()

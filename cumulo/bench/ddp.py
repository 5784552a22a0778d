"""What `cumulo bench ddp` measures: data-parallel steps of several processes over gloo, ours against torch's
DistributedDataParallel, on the same model and tokens in turns, in the same processes."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from cumulo.base.report import Row, available_cores
from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.ranks.collectives import barrier
from cumulo.ranks.groups import Groups, world_group
from cumulo.ranks.start import run_ranks, tell_starter
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import DeviceBatch
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.model.model import TrainingDecoder, initialise
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer, gradient_sink

SPEC = ModelSpec("llama", 4096, 256, 6, 4, 4, 64, 704, 256)
ROWS, LENGTH = 2, 128  # of one process's step
OPTIMIZER = OptimizerConfig(clip_norm=0)


def measure(processes: int, rounds: int, steps: int, tell: Callable[[str], None]) -> list[Row]:
    """Rounds of `steps` steps of each side; speeds are of all processes together."""
    found: dict[str, list[tuple[float, float]]] = {"cumulo": [], "torch": []}

    def heard(message: tuple[str, tuple[float, float]]) -> None:
        found[message[0]].append(message[1])
        tell(f"round {len(found['torch']) + 1} of {rounds}")

    tell("starting processes")
    threads = max(1, available_cores() // processes)
    difference = run_ranks(
        _rank, processes, processes, rounds, steps, timeout_s=None, threads=threads, heard=heard
    )[0]
    tokens = processes * ROWS * LENGTH * steps
    pairs = list(zip(found["cumulo"], found["torch"], strict=True))
    ratio, processor_ratio = (
        statistics.median(other[what] / own[what] for own, other in pairs) for what in (0, 1)
    )
    own_s, torch_s = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
    name = f"data-parallel steps, {processes} processes, gloo: ratio to torch's DDP"
    note = f"{processor_ratio:.2f} × in processor time, which others' load changes less"
    same = "both sides have trained the same model"
    return [
        Row(name, ratio, "×", must=0.9, aim=1.0, note=note),
        Row("Cumulo", tokens / own_s, "tokens/s"),
        Row("torch DistributedDataParallel", tokens / torch_s, "tokens/s"),
        Row("difference of weights after all steps", difference, "of their norm", "lower", 1e-3, note=same),
    ]


def _rank(rank: int, world: int, rounds: int, steps: int) -> float:
    batch = _batch(rank)
    own, other = _model(), _model()
    sides = {
        "cumulo": _our_step(Groups(Layout(dp=world), rank), own, batch),
        "torch": _torch_step(other, batch),
    }
    for step in sides.values():
        step()
    for _ in range(rounds):
        for name, step in sides.items():
            barrier(world_group())
            begin, computed = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            barrier(world_group())
            if rank == 0:
                tell_starter((name, (time.perf_counter() - begin, time.process_time() - computed)))
    return _difference(own, other)


def _our_step(groups: Groups, model: TrainingDecoder, batch: DeviceBatch) -> Callable[[], None]:
    own = pieces(SPEC, groups.layout, groups.rank)
    sink = gradient_sink({0: model}, own, groups, wide_gradients=True)
    optimizer = ShardedOptimizer(sink, OPTIMIZER, SPEC, True, groups)

    def step() -> None:
        sink.begin()
        loss = model(batch).token_sum / (groups.layout.dp * batch.loss_tokens)
        sink.last(0)
        loss.backward()
        optimizer.take_gradients(sink.finish())
        optimizer.step(1.0)

    return step


def _torch_step(model: TrainingDecoder, batch: DeviceBatch) -> Callable[[], None]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIMIZER.learning_rate, betas=betas, eps=OPTIMIZER.epsilon, fused=True
    )

    def step() -> None:
        optimizer.zero_grad()
        (wrapped(batch).token_sum / batch.loss_tokens).backward()  # it takes the mean over processes
        optimizer.step()

    return step


def _model() -> TrainingDecoder:
    model = TrainingDecoder(SPEC)
    initialise(dict(model.named_parameters()), SPEC, seed=0)
    return model


def _batch(rank: int) -> DeviceBatch:
    random = torch.Generator().manual_seed(rank)
    drawn = torch.randint(0, SPEC.vocab_size, (ROWS, LENGTH + 1), generator=random)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    starts = torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH
    return DeviceBatch(
        drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, starts, ROWS, ROWS * LENGTH
    )


def _difference(own: nn.Module, other: nn.Module) -> float:
    """The difference of all weights together: single ones with hardly any gradient follow its rounding under
    AdamW."""
    with torch.no_grad():
        ours, theirs = (nn.utils.parameters_to_vector(model.parameters()) for model in (own, other))
        return float((ours - theirs).norm() / theirs.norm())

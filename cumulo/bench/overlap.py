"""What `cumulo bench overlap` measures: a training step that computes while messages travel, in turns with one that
does not, in the same processes.

Passes are those of a mixture of experts in a pipeline, whose paired passes run one after the other or at the same
time. Weights are sharded by ZeRO 3 and gathered after the layer before has computed, or meanwhile. Messages really
travel. A `LinkShaper` makes the network slower than this host: it sleeps while bytes wait, so that, as with a real
card, an exchange leaves the cores to others.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cumulo.base.report import Row, available_cores
from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.collectives.play.groups import LinkShaper
from cumulo.layout.layout import Layout
from cumulo.ranks.collectives import all_reduce, barrier, meter, use_collectives
from cumulo.ranks.groups import Groups, world_group
from cumulo.ranks.scheduled import CollectiveChoices
from cumulo.ranks.start import run_ranks, tell_starter
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from cumulo.train.run.model_run import ModelRun

LENGTH = 128  # of a sequence
_ROWS = 2  # sequences of a process, with sharded weights
_WEIGHTS_SPEC = ModelSpec("llama", 512, 192, 6, 3, 3, 64, 512, LENGTH)
_FAST = 1e12  # bytes/s: no card is that fast, so none waits
_WARM_UPS, _FREE_STEPS = 3, 2  # steps of each way until memory is found, and over an unlimited network

Step = Callable[[bool], list[Tensor]]  # a step, overlapped or not: what must be the same bits either way


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    ranks: int
    shares: tuple[float, ...]  # seconds that messages need over seconds that the cores need
    rounds: int
    schedule: str = ""  # of a pipeline whose passes are paired; "": sharded weights
    micro_batches: int = 8
    each_connection: bool = False  # the network bounds each connection, not the card

    @property
    def ways(self) -> tuple[str, str]:
        return ("one after the other", "at the same time") if self.schedule else ("post", "pre")


@dataclass(frozen=True, slots=True)
class OverlapSteps:
    """The steps of one rank."""

    free_s: float  # of a step over an unlimited network
    busy_s: float  # processor time of such a step
    rates: list[float]  # of each share: bytes/s
    times: list[tuple[list[float], list[float]]]  # of each share: seconds of both ways
    same: bool


def measure(plan: OverlapPlan, tell: Callable[[str], None]) -> list[Row]:
    tell(f"{plan.ranks} processes")
    found: list[OverlapSteps] = run_ranks(_rank, plan.ranks, plan, timeout_s=1800, heard=tell)
    what = "gradients" if plan.schedule else "losses"
    cores = f"all {plan.ranks} ranks, on {available_cores()} cores"
    rows = [
        Row(f"{what} are equal, bit by bit", all(one.same for one in found), must=True),
        Row("processor time of a step", sum(one.busy_s for one in found), "s", "lower", note=cores),
        Row("step over an unlimited network", max(one.free_s for one in found) * 1e3, "ms", "lower"),
    ]
    limit = "connections" if plan.each_connection else "card"
    for number, share in enumerate(plan.shares):
        title = f"{limit} of {found[0].rates[number] / 1e6:.1f} MB/s, {share:g} ×"
        times = []
        for way, name in enumerate(plan.ways):
            rounds = zip(*(rank.times[number][way] for rank in found), strict=True)
            times.append(statistics.median(map(max, rounds)))
            rows.append(Row(f"{title}: {name}", times[-1] * 1e3, "ms", "lower"))
        rows.append(Row(f"{title}: saved", 100 * (1 - times[1] / times[0]), "%"))
    return rows


def _rank(rank: int, plan: OverlapPlan) -> OverlapSteps:
    shaper = LinkShaper(_FAST, plan.each_connection)
    rings = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), "ring")
    kinds = {"all_to_all": "direct"} if plan.schedule else rings
    use_collectives(CollectiveChoices(kinds, transport="torch", shaper=shaper))  # type: ignore[arg-type]
    step = (_passes if plan.schedule else _weights)(rank, plan)

    def timed(overlapped: bool) -> tuple[float, list[Tensor]]:
        barrier(world_group())
        began_s = time.perf_counter()
        kept = step(overlapped)
        barrier(world_group())
        return time.perf_counter() - began_s, kept

    for _ in range(_WARM_UPS):
        for overlapped in (False, True):
            timed(overlapped)
    meter.take_times()
    before_s = time.process_time()
    free = [timed(way)[0] for _ in range(_FREE_STEPS) for way in (False, True)]
    busy_s = (time.process_time() - before_s) / len(free)
    members = 2 if plan.schedule else plan.ranks  # of a group that exchanges
    counted = [one for one in meter.take_times() if one.kind in kinds]
    sent = sum(one.calls * one.size_bytes * busbw_factor(one.kind, members) for one in counted) / len(free)
    total = torch.tensor([busy_s, sent], dtype=torch.float64)
    all_reduce(total, world_group())
    core_s, mean_bytes = float(total[0]) / available_cores(), float(total[1]) / plan.ranks
    rates, times, same = [], [], True
    for share in plan.shares:
        shaper.bytes_per_s = mean_bytes / (share * core_s)
        rates.append(shaper.bytes_per_s)
        took: tuple[list[float], list[float]] = ([], [])
        for round_ in range(plan.rounds):
            kept = []
            for way, name in enumerate(plan.ways):
                if rank == 0:
                    tell_starter(f"messages {share:g} ×, {name}, {round_ + 1} of {plan.rounds}")
                seconds, result = timed(bool(way))
                took[way].append(seconds)
                kept.append(result)
            same &= len(kept[0]) > 0 and all(map(torch.equal, *kept))
        times.append(took)
    use_collectives("")
    return OverlapSteps(statistics.median(free), busy_s, rates, times, same)


def _passes(rank: int, plan: OverlapPlan) -> Step:
    layout = Layout(pp=plan.ranks // 2, dp=2, ep=2, schedule=plan.schedule)
    chunks = layout.pp * (2 if plan.schedule == "dualpipe-v" else 1)
    spec = ModelSpec(
        "qwen3_moe", 512, 256, chunks, 4, 4, 64, 512, LENGTH, qk_norm=True, moe=MoESpec(8, 2, 256)
    )
    config = TrainConfig(
        batch_sequences=2 * plan.micro_batches,
        micro_batch=1,
        device="cpu",
        data=DataConfig(sequence_length=LENGTH),
        model=ModelConfig(start_from="the benchmark's own"),
        layout=layout,
        overlap_passes=True,
    )
    groups = Groups(layout, rank)
    run = ModelRun(spec, config, groups, torch.device("cpu"))
    lanes = (None, run.second_lane)
    batch = _random_batch(groups.place.dp, plan.micro_batches, spec.vocab_size)

    def step(overlapped: bool) -> list[Tensor]:
        run.second_lane = lanes[overlapped]
        run.gradients(batch, 2 * plan.micro_batches * LENGTH)
        gradients = [
            parameter.grad.clone()
            for chunk in run.chunks.values()
            for parameter in chunk.parameters()
            if parameter.grad is not None
        ]
        run.forget()
        return gradients

    return step


def _weights(rank: int, plan: OverlapPlan) -> Step:
    layout = Layout(dp=plan.ranks, zero=3)

    def run_of(way: str) -> ModelRun:
        config = TrainConfig(
            batch_sequences=plan.ranks * _ROWS,
            micro_batch=_ROWS,
            device="cpu",
            steps=1000,
            data=DataConfig(sequence_length=LENGTH),
            model=ModelConfig(start_from="the benchmark's own"),
            schedule=ScheduleConfig("constant", warmup_steps=0),
            optimizer=OptimizerConfig(clip_norm=0),
            layout=layout,
            fsdp_prefetch=way,  # type: ignore[arg-type]
        )
        return ModelRun(_WEIGHTS_SPEC, config, Groups(layout, rank), torch.device("cpu"))

    runs = [run_of(way) for way in plan.ways]
    batch, tokens = _random_batch(rank, _ROWS, _WEIGHTS_SPEC.vocab_size), plan.ranks * _ROWS * LENGTH

    def step(overlapped: bool) -> list[Tensor]:
        """It ends where the next forward may begin."""
        run = runs[overlapped]
        loss = run.gradients(batch, tokens).loss
        run.clip()
        run.step(1.0)
        return [torch.tensor(loss, dtype=torch.float64)]

    return step


def _random_batch(place: int, rows: int, vocab_size: int) -> Batch:
    """The batch of one process: `rows` sequences of its own."""
    tokens = np.random.default_rng(place).integers(0, vocab_size, (rows, LENGTH + 1))
    positions = np.broadcast_to(np.arange(LENGTH), (rows, LENGTH)).copy()
    starts = np.arange(0, (rows + 1) * LENGTH, LENGTH, dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, starts, rows * LENGTH)

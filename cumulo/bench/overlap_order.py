"""What `cumulo bench overlap --of weights` measures: data-parallel steps over a network slower than this host,
whose sharded weights are gathered after the layer before has computed, or meanwhile. In turns, in the same
processes; the losses must be the same bits."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from cumulo.base.report import Row, available_cores
from cumulo.bench.overlap_passes import LENGTH, random_batch
from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.collectives.play.groups import LinkShaper
from cumulo.layout.layout import Layout
from cumulo.ranks.collectives import all_reduce, barrier, meter, use_collectives
from cumulo.ranks.groups import Groups, world_group
from cumulo.ranks.scheduled import CollectiveChoices
from cumulo.ranks.start import run_ranks
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from cumulo.train.run.model_run import ModelRun

ROWS = 2  # of one process's step
SPEC = ModelSpec("llama", 512, 192, 6, 3, 3, 64, 512, LENGTH)
_FAST = 1e12
_FIRST = 4  # steps until memory is found
_RINGS = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring"}


Prefetch = Literal["pre", "post"]
WAYS: tuple[Prefetch, Prefetch] = ("post", "pre")


@dataclass(frozen=True, slots=True)
class OrderPlan:
    ranks: int
    shares: tuple[float, ...]  # seconds that messages need over seconds that the cores need
    rounds: int

    def config(self, way: Prefetch) -> TrainConfig:
        return TrainConfig(
            batch_sequences=self.ranks * ROWS,
            micro_batch=ROWS,
            device="cpu",
            steps=1000,
            data=DataConfig(sequence_length=LENGTH),
            model=ModelConfig(start_from="the benchmark's own"),
            schedule=ScheduleConfig("constant", warmup_steps=0),
            optimizer=OptimizerConfig(clip_norm=0),
            layout=Layout(dp=self.ranks, zero=3),
            fsdp_prefetch=way,
        )


def measure(plan: OrderPlan, tell: Callable[[str], None]) -> list[Row]:
    tell(f"{plan.ranks} processes")
    found = run_ranks(_rank, plan.ranks, plan, timeout_s=1800, heard=tell)
    rows = [Row("losses are equal, bit by bit", all(one[0] for one in found), must=True)]
    for number, share in enumerate(plan.shares):
        rate = found[0][1][number]
        times = [
            statistics.median(max(one) for one in zip(*(rank[2][number][way] for rank in found), strict=True))
            for way in WAYS
        ]
        title = f"card of {rate / 1e6:.1f} MB/s, {share:g} ×"
        rows += [
            Row(f"{title}: {way}", seconds * 1e3, "ms", "lower")
            for way, seconds in zip(WAYS, times, strict=True)
        ]
        rows.append(Row(f"{title}: {WAYS[1]} saves", 100 * (1 - times[1] / times[0]), "%"))
    return rows


Times = list[dict[str, list[float]]]


def _rank(rank: int, plan: OrderPlan) -> tuple[bool, list[float], Times]:
    shaper = LinkShaper(_FAST)
    use_collectives(CollectiveChoices(_RINGS, transport="torch", shaper=shaper))  # type: ignore[arg-type]
    runs = {
        way: ModelRun(SPEC, plan.config(way), Groups(plan.config(way).layout, rank), torch.device("cpu"))
        for way in WAYS
    }
    batch, tokens = random_batch(rank, ROWS, SPEC.vocab_size), plan.ranks * ROWS * LENGTH
    losses: dict[str, list[float]] = {way: [] for way in WAYS}

    def step(way: Prefetch) -> float:
        """It ends where the next forward may begin."""
        began_s = time.perf_counter()
        losses[way].append(runs[way].gradients(batch, tokens).loss)
        runs[way].clip()
        runs[way].step(1.0)
        return time.perf_counter() - began_s

    busy_s, sent = _calibrated(plan, step)
    rates, times = [], []
    for share in plan.shares:
        shaper.bytes_per_s = sent / (share * busy_s)
        rates.append(shaper.bytes_per_s)
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(plan.rounds):
            for way in WAYS:
                barrier(world_group())
                took[way].append(statistics.mean(step(way) for _ in range(3)))
        times.append(took)
    use_collectives("")
    first, second = losses.values()
    return first == second, rates, times


def _calibrated(plan: OrderPlan, step: Callable[[Prefetch], float]) -> tuple[float, float]:
    """Seconds of all cores, and bytes that a rank sends, of a step."""
    for _ in range(_FIRST):
        for way in WAYS:
            step(way)
    meter.take_times()
    before_s = time.process_time()
    step(WAYS[0])
    step(WAYS[1])
    counted = [
        one for one in meter.take_times() if one.kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    sent = sum(one.calls * one.size_bytes * busbw_factor(one.kind, plan.ranks) for one in counted) / 2
    total = torch.tensor([(time.process_time() - before_s) / 2, sent], dtype=torch.float64)
    all_reduce(total, world_group())
    return float(total[0]) / available_cores(), float(total[1]) / plan.ranks

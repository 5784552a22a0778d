"""What `cumulo bench overlap` measures: steps of a mixture of experts in a pipeline, whose paired passes run in
turns one after the other and at the same time.

The ranks' tokens really travel to their experts. A `LinkShaper` makes the network slower than this host: it sleeps
while bytes wait, so that, as with a real card, an exchange leaves the cores to others.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cumulo.base.report import Row, available_cores
from cumulo.collectives.play.groups import LinkShaper
from cumulo.layout.layout import Layout
from cumulo.ranks.collectives import all_reduce, barrier, meter, use_collectives
from cumulo.ranks.groups import Groups, world_group
from cumulo.ranks.scheduled import CollectiveChoices
from cumulo.ranks.start import run_ranks, tell_starter
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import DataConfig, ModelConfig, TrainConfig
from cumulo.train.run.model_run import ModelRun

LENGTH = 128  # of a sequence


def random_batch(place: int, rows: int, vocab_size: int) -> Batch:
    """The batch of one process: `rows` sequences of its own."""
    tokens = np.random.default_rng(place).integers(0, vocab_size, (rows, LENGTH + 1))
    positions = np.broadcast_to(np.arange(LENGTH), (rows, LENGTH)).copy()
    starts = np.arange(0, (rows + 1) * LENGTH, LENGTH, dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, starts, rows * LENGTH)


_FAST = 1e12  # bytes/s: no card is that fast, so none waits
_FREE_STEPS = 3  # over an unlimited network


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    ranks: int
    schedule: str
    micro_batches: int
    shares: tuple[float, ...]  # seconds that exchanges need over seconds that the cores need
    each_connection: bool  # the network bounds each connection, not the card
    rounds: int

    @property
    def layout(self) -> Layout:
        return Layout(pp=self.ranks // 2, dp=2, ep=2, schedule=self.schedule)

    @property
    def spec(self) -> ModelSpec:
        chunks = self.layout.pp * (2 if self.schedule == "dualpipe-v" else 1)
        return ModelSpec(
            "qwen3_moe", 512, 256, chunks, 4, 4, 64, 512, LENGTH, qk_norm=True, moe=MoESpec(8, 2, 256)
        )

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            batch_sequences=2 * self.micro_batches,
            micro_batch=1,
            device="cpu",
            data=DataConfig(sequence_length=LENGTH),
            model=ModelConfig(start_from="the benchmark's own"),
            layout=self.layout,
            overlap_passes=True,
        )


@dataclass(frozen=True, slots=True)
class OverlapSteps:
    """The steps of one rank."""

    free_s: float  # of a step over an unlimited network, one after the other
    busy_s: float  # processor time of such a step
    rates: tuple[float, ...]  # of each share: bytes/s
    times: tuple[dict[bool, list[float]], ...]  # of each share: steps one after the other, at the same time
    same: bool


def measure(plan: OverlapPlan, tell: Callable[[str], None]) -> list[Row]:
    tell(f"{plan.ranks} processes")
    found: list[OverlapSteps] = run_ranks(_rank, plan.ranks, plan, timeout_s=1800, heard=tell)
    rows = [
        Row("gradients are equal, bit by bit", all(one.same for one in found), must=True),
        Row(
            "processor time of a step", sum(one.busy_s for one in found), "s", "lower",
            note=f"all {plan.ranks} ranks, on {available_cores()} cores",
        ),
        Row("step over an unlimited network", max(one.free_s for one in found) * 1e3, "ms", "lower"),
    ]  # fmt: skip
    for number, share in enumerate(plan.shares):
        times = [
            statistics.median(
                max(one) for one in zip(*(rank.times[number][way] for rank in found), strict=True)
            )
            for way in (False, True)
        ]
        what = "connections" if plan.each_connection else "card"
        title = f"{what} of {found[0].rates[number] / 1e6:.1f} MB/s, {share:g} ×"
        rows += [
            Row(f"{title}: one after the other", times[0] * 1e3, "ms", "lower"),
            Row(f"{title}: at the same time", times[1] * 1e3, "ms", "lower"),
            Row(f"{title}: saved", 100 * (1 - times[1] / times[0]), "%"),
        ]
    return rows


def _rank(rank: int, plan: OverlapPlan) -> OverlapSteps:
    groups, shaper = Groups(plan.layout, rank), LinkShaper(_FAST, plan.each_connection)
    use_collectives(CollectiveChoices({"all_to_all": "direct"}, transport="torch", shaper=shaper))
    run = ModelRun(plan.spec, plan.config, groups, torch.device("cpu"))
    lanes = {False: None, True: run.second_lane}
    batch, tokens = (
        random_batch(groups.place.dp, plan.micro_batches, plan.spec.vocab_size),
        2 * plan.micro_batches * LENGTH,
    )

    def step(together: bool) -> tuple[float, dict[str, Tensor]]:
        run.second_lane = lanes[together]
        barrier(world_group())
        began_s = time.perf_counter()
        run.gradients(batch, tokens)
        barrier(world_group())
        took_s = time.perf_counter() - began_s
        gradients = {
            f"{number}.{name}": parameter.grad.clone()
            for number, chunk in run.chunks.items()
            for name, parameter in chunk.named_parameters()
            if parameter.grad is not None
        }
        run.forget()
        return took_s, gradients

    for together in (False, True):
        step(together)  # both lanes connect, and memory is found
    meter.take_times()
    before_s, free = time.process_time(), []
    for _ in range(_FREE_STEPS):
        free.append(step(False)[0])
    busy_s = (time.process_time() - before_s) / _FREE_STEPS
    exchanged = [one for one in meter.take_times() if one.kind == "all_to_all"]
    sent = sum(one.calls * one.size_bytes for one in exchanged) / _FREE_STEPS / 2  # half stays on the rank
    total = torch.tensor([busy_s, sent], dtype=torch.float64)
    all_reduce(total, world_group())
    core_s, mean_bytes = float(total[0]) / available_cores(), float(total[1]) / plan.ranks
    rates, times, same = [], [], True
    for share in plan.shares:
        shaper.bytes_per_s = mean_bytes / (share * core_s)
        rates.append(shaper.bytes_per_s)
        took: dict[bool, list[float]] = {False: [], True: []}
        for round_ in range(plan.rounds):
            kept = {}
            for together in (False, True):
                if rank == 0:
                    way = "at the same time" if together else "one after the other"
                    tell_starter(f"exchanges {share:g} ×, {way}, {round_ + 1} of {plan.rounds}")
                seconds, kept[together] = step(together)
                took[together].append(seconds)
            same &= len(kept[True]) > 0 and all(
                torch.equal(own, kept[True][name]) for name, own in kept[False].items()
            )
        times.append(took)
    use_collectives("")
    return OverlapSteps(statistics.median(free), busy_s, tuple(rates), tuple(times), same)

"""What `cumulo bench overlap` measures: steps of a mixture of experts in a pipeline, whose paired passes run in
turns one after the other and at the same time, next to what the simulator says of both.

The ranks' tokens really travel to their experts, over TCP. A `LinkShaper` makes the network slower than this
host: it sleeps while bytes wait, so that, as with a real card, an exchange leaves the cores to others. The
simulator knows that all ranks share this machine's cores, and whether two passes share a card.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cumulo.base.report import Row, available_cores
from cumulo.collectives.play.sockets import LinkShaper
from cumulo.layout.layout import Layout
from cumulo.pipeline.decide.actions import Action, Kind
from cumulo.pipeline.simulate.passes import PassCost, PassKey, PassMachine, pass_key, play_passes
from cumulo.ranks.collectives import all_reduce, all_to_all, barrier, meter, use_collectives
from cumulo.ranks.groups import Group, Groups, world_group
from cumulo.ranks.scheduled import CollectiveChoices
from cumulo.ranks.start import run_ranks, tell_starter
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import DataConfig, ModelConfig, TrainConfig
from cumulo.train.parallel.pipelined import training_schedule
from cumulo.train.run.model_run import ModelRun

Parts = list[tuple[float, float]]


@dataclass(slots=True)
class PassTrace:
    """The trace of one rank. It hears of exchanges from the meter."""

    passes: dict[PassKey, list[Parts]] = field(default_factory=dict)  # of each step
    _here: threading.local = field(default_factory=threading.local)

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        if not action.kind.is_compute:
            yield
            return
        here = self._here
        here.parts, here.since_s = [], time.thread_time()
        try:
            yield
        finally:
            here.parts.append((time.thread_time() - here.since_s, 0.0))
            self.passes.setdefault(pass_key(action), []).append(here.parts)
            here.parts = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        meter.listener = self._heard
        try:
            yield
        finally:
            meter.listener = None

    def _heard(self, kind: str, sent_bytes: float) -> None:
        parts = getattr(self._here, "parts", None)
        if parts is not None and kind == "all_to_all":
            now_s = time.thread_time()
            parts.append((now_s - self._here.since_s, sent_bytes))
            self._here.since_s = now_s

    def seconds(self) -> float:
        """Of a step, in the middle of those that were traced."""
        steps = zip(*self.passes.values(), strict=True)
        return float(statistics.median(sum(part[0] for parts in step for part in parts) for step in steps))


def pass_costs(traces: Sequence[Mapping[PassKey, list[Parts]]]) -> dict[PassKey, PassCost]:
    """Seconds: the middle of all ranks' and steps' passes of a kind on a chunk. Bytes: each pass's own, of its
    largest sender, for whom the others wait."""
    alike: dict[tuple[Kind, int], list[Parts]] = {}
    sizes: dict[PassKey, list[list[float]]] = {}
    for trace in traces:
        for key, steps in trace.items():
            alike.setdefault((key[0], key[2]), []).extend(steps)
            sizes.setdefault(key, []).append([size for _, size in steps[-1]])
    seconds = {
        name: [statistics.median(part[0] for part in column) for column in zip(*many, strict=True)]
        for name, many in alike.items()
    }
    return {
        key: PassCost(
            tuple(
                zip(seconds[key[0], key[2]], (max(column) for column in zip(*rows, strict=True)), strict=True)
            )
        )
        for key, rows in sizes.items()
    }


LENGTH = 128  # of a sequence


def random_batch(place: int, rows: int, vocab_size: int) -> Batch:
    """The batch of one process: `rows` sequences of its own."""
    tokens = np.random.default_rng(place).integers(0, vocab_size, (rows, LENGTH + 1))
    positions = np.broadcast_to(np.arange(LENGTH), (rows, LENGTH)).copy()
    starts = np.arange(0, (rows + 1) * LENGTH, LENGTH, dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, starts, rows * LENGTH)


_FAST = 1e12  # bytes/s: no card is that fast, so none waits
_TRACED = 3  # steps
WITHIN = 0.2  # of the predicted saving
_LEAST_SAVING = 0.15  # smaller ones are compared in points of the step: there is little to be right about


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

    passes: Mapping[PassKey, list[Parts]]
    rest_s: float  # of a step, in processor time besides the passes
    free_s: float  # of a step over an unlimited network, one after the other
    cards: tuple[
        tuple[float, float], ...
    ]  # of each share: bytes/s, and seconds of an exchange besides its bytes
    times: tuple[dict[bool, list[float]], ...]  # of each share: steps one after the other, at the same time
    busy_s: float  # processor time of a step over the slower networks
    same: bool


def measure(plan: OverlapPlan, tell: Callable[[str], None]) -> list[Row]:
    tell(f"{plan.ranks} processes")
    found: list[OverlapSteps] = run_ranks(_rank, plan.ranks, plan, timeout_s=1800, heard=tell)
    schedule = training_schedule(plan.layout, plan.micro_batches)
    costs = pass_costs([one.passes for one in found])
    cores = available_cores()
    rest_s = sum(one.rest_s for one in found) / cores
    free_s = rest_s + play_passes(schedule, costs, PassMachine(cores, plan.layout.dp, _FAST), False)
    rows = [
        Row("gradients are equal, bit by bit", all(one.same for one in found), must=True),
        Row(
            "processor time of a step", sum(one.rest_s for one in found) + _passes_s(found), "s", "lower",
            note=f"all {plan.ranks} ranks, on {cores} cores; over the slower networks "
            f"{sum(one.busy_s for one in found):.3g} s",
        ),
        Row(
            "step over an unlimited network", max(one.free_s for one in found) * 1e3, "ms", "lower",
            note=f"predicted {free_s * 1e3:.0f} ms; much longer: other programs use the cores, and what follows "
            "is wrong",
        ),
    ]  # fmt: skip
    for number, share in enumerate(plan.shares):
        rate, extra_s = found[0].cards[number]
        machine = PassMachine(cores, plan.layout.dp, rate, plan.each_connection, max(0.0, extra_s))
        times = [
            statistics.median(
                max(one) for one in zip(*(rank.times[number][way] for rank in found), strict=True)
            )
            for way in (False, True)
        ]
        said = [rest_s + play_passes(schedule, costs, machine, way) for way in (False, True)]
        what = "connections" if plan.each_connection else "card"
        rows += _rows(f"{what} of {rate / 1e6:.1f} MB/s, {share:g} ×", times, said)
    return rows


def _passes_s(found: Sequence[OverlapSteps]) -> float:
    return sum(part[0] for one in found for steps in one.passes.values() for part in steps[len(steps) // 2])


def _rows(title: str, times: list[float], said: list[float]) -> list[Row]:
    saved, predicted = 1 - times[1] / times[0], 1 - said[1] / said[0]
    note = "predicted {:.0f} ms".format
    return [
        Row(f"{title}: one after the other", times[0] * 1e3, "ms", "lower", note=note(said[0] * 1e3)),
        Row(f"{title}: at the same time", times[1] * 1e3, "ms", "lower", note=note(said[1] * 1e3)),
        Row(f"{title}: saved", 100 * saved, "%", note=f"predicted {predicted:.1%}"),
        Row(
            f"{title}: saving, off its prediction",
            abs(saved - predicted) / max(predicted, _LEAST_SAVING),
            "",
            "lower",
            must=WITHIN,
            note=f"of {max(predicted, _LEAST_SAVING):.0%} of the step",
        ),
    ]


def _rank(rank: int, plan: OverlapPlan) -> OverlapSteps:
    groups, shaper = Groups(plan.layout, rank), LinkShaper(_FAST, plan.each_connection)
    use_collectives(CollectiveChoices({"all_to_all": "direct"}, transport="tcp", shaper=shaper))
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

    trace, rest_s, free_s = _traced(run, step)
    sent = sum(part[1] for steps in trace.passes.values() for part in steps[-1])
    total = torch.tensor([trace.seconds() + rest_s, sent], dtype=torch.float64)
    all_reduce(total, world_group())
    busy_s, mean_bytes = float(total[0]) / available_cores(), float(total[1]) / plan.ranks
    cards, times, busy, same = [], [], [], True
    for share in plan.shares:
        shaper.bytes_per_s = mean_bytes / (share * busy_s)
        cards.append((shaper.bytes_per_s, _exchange_s(shaper, groups.group("ep"))))
        took: dict[bool, list[float]] = {False: [], True: []}
        for round_ in range(plan.rounds):
            kept = {}
            for together in (False, True):
                if rank == 0:
                    way = "at the same time" if together else "one after the other"
                    tell_starter(f"exchanges {share:g} ×, {way}, {round_ + 1} of {plan.rounds}")
                before_s = time.process_time()
                seconds, kept[together] = step(together)
                took[together].append(seconds)
                busy.append(time.process_time() - before_s)
            same &= len(kept[True]) > 0 and all(
                torch.equal(own, kept[True][name]) for name, own in kept[False].items()
            )
        times.append(took)
    use_collectives("")
    return OverlapSteps(
        trace.passes, rest_s, free_s, tuple(cards), tuple(times), statistics.median(busy), same
    )


def _traced(run: ModelRun, step: Callable[[bool], tuple[float, object]]) -> tuple[PassTrace, float, float]:
    """Passes without waits for a card, the processor time of a step besides them, and what the step took."""
    for together in (False, True):
        step(together)  # both lanes connect, and memory is found
    trace, rests, took = PassTrace(), [], []
    run.timed = trace
    with trace.listening():
        for _ in range(_TRACED):
            before_s = time.process_time()
            took.append(step(False)[0])
            rests.append(time.process_time() - before_s)
    run.timed = None
    return trace, max(0.0, statistics.median(rests) - trace.seconds()), statistics.median(took)


def _exchange_s(shaper: LinkShaper, group: Group) -> float:
    """What an exchange takes besides its bytes: waking up late."""
    sent = torch.zeros(group.size(), 1 << 14)
    received, times = torch.empty_like(sent), []
    away = sent.nbytes * (group.size() - 1) / group.size()
    for _ in range(9):
        barrier(group)
        began_s = time.perf_counter()
        all_to_all(received, sent, group)
        times.append(time.perf_counter() - began_s - away / shaper.bytes_per_s)
    worst = torch.tensor([statistics.median(times)], dtype=torch.float64)
    all_reduce(worst, world_group())
    return float(worst) / world_group().size()

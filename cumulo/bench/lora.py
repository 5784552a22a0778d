"""`cumulo bench lora`: what adapters add to a step, on the runner that serves. The same step is played again and
again without adapters, with one for all rows, and with many interleaved ones, in turns; a figure is the median of
the turns' ratios, so that a noisy neighbour hits all alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from cumulo.base.report import Row
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, Runner, StepPlan
from cumulo.engine.llm import LLM
from cumulo.models.adapters.files import AdapterWeights, LowRankPair, adaptable_matrices
from cumulo.spec.model import ModelSpec

_CONTEXT = 15  # tokens that every row has behind it: little attention, so that adapters weigh more
_GPU_MUST = 1.15


def measure(
    model: str | None,
    config: EngineConfig,
    rows: int,
    adapters: int,
    rank: int,
    rounds: int,
    tell: Callable[[str], None],
) -> list[Row]:
    """`rows` of one token each, and a prompt of as many tokens as a step takes."""
    config = replace(
        config,
        max_context=config.max_context or 256,
        max_running=3 * rows,
        kv_memory_gib=config.kv_memory_gib or 1.0,
        prefix_cache=False,
    )
    tell("loading the model without room for adapters")
    with LLM(model, config=config) as plain:
        tell("loading it with room")
        with LLM(model, config=config, max_loras=adapters, max_lora_rank=rank) as llm:
            store = llm.engine.adapters
            assert store is not None
            for number in range(adapters):
                tell(f"making adapter {number + 1} of {adapters}")
                store.add(f"adapter-{number}", random_adapter(llm.spec, rank, number))
            return _race(plain, llm, rows, adapters, rank, rounds, tell)


def random_adapter(spec: ModelSpec, rank: int, seed: int) -> AdapterWeights:
    """Of every matrix that can be adapted, too weak to change what is said."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for matrix in adaptable_matrices(spec):
        for section in matrix.sections:
            outputs, inputs = section.whole
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * 1e-3
            pairs[section.source] = LowRankPair(a, b, 1.0)
    return AdapterWeights(Path(f"random-{seed}"), pairs, f"random-{rank}-{seed}")


def _race(
    plain: LLM, llm: LLM, rows: int, adapters: int, rank: int, rounds: int, tell: Callable[[str], None]
) -> list[Row]:
    sides: dict[str, tuple[Runner, StepPlan]] = {}
    many = [number % adapters for number in range(rows)]
    for index, (name, own, held) in enumerate(
        (
            ("no room", plain, [-1] * rows),
            ("none", llm, [-1] * rows),
            ("one", llm, [0] * rows),
            ("many", llm, many),
        )
    ):
        first = 0 if own is plain else (index - 1) * rows
        sides[name] = own.engine.runner, _decode(own, first, held)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        tell(f"round {turn} of {rounds}")
        for name, (runner, plan) in sides.items():
            began_s = time.perf_counter()
            runner.submit(plan).result()
            if turn:  # the first makes what is made on first use
                times[name].append(time.perf_counter() - began_s)

    def ratio(name: str, to: str) -> float:
        return statistics.median(one / other for one, other in zip(times[name], times[to], strict=True))

    must = _GPU_MUST if llm.config.device == "cuda" else None
    step_ms = statistics.median(times["none"]) * 1e3
    one, several = f"one adapter of rank {rank}", f"{adapters} adapters of rank {rank}"
    taken = llm.ledger["adapters"].measured or 0
    return [
        Row(f"step of {rows} rows without adapters", step_ms, "ms", better="lower"),
        Row("room for adapters, none used, over no room", ratio("none", "no room"), "×", better="lower"),
        Row(f"{one} for all rows, over none", ratio("one", "none"), "×", better="lower"),
        Row(f"{several} interleaved, over none", ratio("many", "none"), "×", better="lower", must=must),
        Row(f"{adapters} adapters, memory", taken / (1 << 20), "MiB", better="lower"),
    ]


def _decode(llm: LLM, first: int, adapters: list[int]) -> StepPlan:
    """Seat rows with these adapters in slots from `first` on; the step in which each draws its next token."""
    runner, size = llm.engine.runner, llm.config.block_size
    per_row = -(-(_CONTEXT + 2) // size)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    rows = len(adapters)
    slots = list(range(first, first + rows))
    tokens = [[(31 * row + 7 * k) % llm.spec.vocab_size for k in range(_CONTEXT + 1)] for row in range(rows)]
    # Prompts are computed a few at a time: a step has room for so many tokens only.
    together = max(1, llm.config.max_tokens_per_step // (_CONTEXT + 1))
    for begin in range(0, rows, together):
        chosen = range(begin, min(begin + together, rows))
        plan = StepPlan(-1, slots=[slots[row] for row in chosen])
        plan.starts, plan.counts = [0] * len(chosen), [_CONTEXT + 1] * len(chosen)
        for row in chosen:
            blocks = list(range(slots[row] * per_row, (slots[row] + 1) * per_row))
            plan.begin.append(
                NewSlot(slots[row], tokens[row], len(tokens[row]), blocks, params, 0, 0, adapters[row])
            )
        runner.submit(plan).result()
    step = StepPlan(-1, slots=slots, starts=[_CONTEXT] * rows)
    step.draw_one_each()
    return step

"""The real engine under a trace, with everything noted that a simulator predicts. Used by simulate_serving.py."""

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.replica import FORMATS
from cumulo.plan.serve.step_cost import StepLoad, load_of
from cumulo.plan.serve.step_cost_work import Format
from cumulo.spec.model import ModelSpec

FILE = json.loads((Path(__file__).parent / "workloads.json").read_text())


@dataclass
class Seen:
    """One real run: what the steps took, and what clients saw."""

    loads: list[StepLoad] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


def serve_really(engine: Any, arrivals: Sequence[Arrival], seed: int) -> Seen:
    """Play a trace in real time and note everything."""
    from cumulo.engine.decide.params import SamplingParams

    seen, rng = Seen(), random.Random(seed)
    scheduler, runner = engine.scheduler, engine.runner
    plan, apply, submit = scheduler.plan, scheduler.apply, runner.submit
    planned_s = [0.0]

    def planning(now_s: float) -> StepPlan | None:
        began_s = time.perf_counter()
        made: StepPlan | None = plan(now_s)
        planned_s[0] = time.perf_counter() - began_s
        return made

    def submitting(made: StepPlan) -> Any:
        seen.loads.append(load_of(made))
        began_s = time.perf_counter()
        pending = submit(made)
        seen.submit_s.append(planned_s[0] + time.perf_counter() - began_s)
        return pending

    def applying(made: StepPlan, result: Any, now_s: float) -> Any:
        seen.step_s.append(result.finished_s - result.started_s)
        began_s = time.perf_counter()
        advanced = apply(made, result, now_s)
        seen.apply_s.append(time.perf_counter() - began_s)
        return advanced

    scheduler.plan, scheduler.apply, runner.submit = planning, applying, submitting
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(one.prompt_tokens)] for one in arrivals]
    due, last, coming = {}, {}, 0
    began_s = time.perf_counter()
    while coming < len(arrivals) or engine.has_work:
        while coming < len(arrivals) and arrivals[coming].arrived_s <= time.perf_counter() - began_s:
            one = arrivals[coming]
            params = SamplingParams(
                temperature=1.0, max_tokens=one.output_tokens, ignore_eos=True, seed=coming
            )
            adding_s = time.perf_counter()
            request = engine.add(prompts[coming], params, stream=True)
            seen.arrival_s.append(time.perf_counter() - adding_s)
            due[request.id] = began_s + one.arrived_s
            coming += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[coming].arrived_s - (time.perf_counter() - began_s)))
            continue
        for delta in engine.step().deltas:
            now_s = time.perf_counter()
            if delta.token_ids:
                seen.tokens += len(delta.token_ids)
                if delta.request_id in last:
                    seen.gaps_s.append(now_s - last[delta.request_id])
                else:
                    seen.ttft_s.append(now_s - due[delta.request_id])
                last[delta.request_id] = now_s
    seen.seconds = time.perf_counter() - began_s
    scheduler.plan, scheduler.apply, runner.submit = plan, apply, submit
    scheduler.pool.clear_cache()
    return seen


def start_here(device: str, model: str) -> tuple[Any, ModelSpec, Format]:
    """An engine, its model, and how it keeps its numbers."""
    from cumulo.engine.assembly import assemble
    from cumulo.engine.config import EngineConfig

    if device == "cpu":
        made = assemble(
            model or None, EngineConfig(device="cpu", max_context=2048), True, None, with_tokenizer=False
        )
        kept = "q4_1" if made.model.quantised else "float32"
        return made.engine, made.model.spec, FORMATS[kept]
    sys.path.insert(0, str(Path(__file__).parent))
    import gpu

    spec = gpu.spec_from_config(FILE["models"][model])
    config = EngineConfig(max_context=9096).settled("cuda")
    decoder = gpu.random_decoder(spec)
    memory = gpu.plan_memory(spec, 0, config, gpu.free_memory(config))
    engine, _ = gpu.start_engine(decoder, config, memory)
    return engine, spec, FORMATS["bfloat16"]

"""`cumulo bench guided`: what guides add to a step.

Two engines with the same prompts, one of them guided, take steps in turns. Nothing is overlapped: what masks cost
shows whole.
"""

import json
import statistics
from dataclasses import replace

from cumulo.base.report import Row
from cumulo.bench.turns import Tell, median_ratio, take_turns, timed
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.llm import LLM

BATCH = 16
COST_MUST = 0.10  # of a step
_WARM_UP_STEPS = 8
# A list nobody finishes within the measurement: nested, with free strings, numbers and choices, as real ones are.
_LONG_FORM = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["person", "robot", "animal"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


def measure(model: str | None, config: EngineConfig, steps: int, tell: Tell) -> list[Row]:
    serial = replace(config, overlap=False, max_context=64 + steps + 2 * _WARM_UP_STEPS)
    with LLM(model, config=serial, progress=tell) as guided, LLM(model, config=serial, progress=tell) as free:
        _fill(guided, Guide("json_schema", json.dumps(_LONG_FORM)), steps)
        _fill(free, None, steps)
        sides = {"guided": timed(guided.engine.step), "free": timed(free.engine.step)}
        times = take_turns(sides, steps, tell, _WARM_UP_STEPS)
    step_ms, guided_ms = (1e3 * statistics.median(times[name]) for name in ("free", "guided"))
    ratio, pairs = median_ratio(times["guided"], times["free"]), f"median of {steps} pairs"
    return [
        Row(f"step, {BATCH} sequences without guides", step_ms, "ms", "lower"),
        Row(f"step, {BATCH} sequences with guides", guided_ms, "ms", "lower"),
        Row("step with guides / without", ratio, "×", "lower", must=1 + COST_MUST, note=pairs),
    ]


def _fill(llm: LLM, guide: Guide | None, steps: int) -> None:
    """A full batch, past its prompts."""
    for number in range(BATCH):
        prompt = llm.tokenizer.encode(f"List number {number} of people, robots and animals, as JSON:\n")
        params = SamplingParams(
            guide=guide,
            temperature=1.0,
            seed=number,
            max_tokens=steps + 2 * _WARM_UP_STEPS,
            ignore_eos=guide is None,
        )
        llm.engine.add(prompt, params)
    while any(sequence.output_length == 0 for sequence in llm.engine.scheduler.running) or (
        len(llm.engine.scheduler.running) < BATCH
    ):
        llm.engine.step()

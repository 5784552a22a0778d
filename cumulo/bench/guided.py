"""What guides promise and what they cost: `cumulo bench guided`.

Promise: schemas of the official test suite, drawn at random from those that can be enforced, answered by the
model in batches; every answer that ends by itself must fit its schema. Cost: the same batch, a step with guides
and a step without in turn, so that whatever slows the machine slows both.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cumulo.base.report import Row
from cumulo.bench import schema_judge
from cumulo.bench.schema_judge import CannotJudge, Judge, SuiteSchema
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.llm import LLM
from cumulo.errors import InvalidRequest

BATCH = 16
MAX_TOKENS = 150
MOST_SCHEMA_CHARACTERS = 600  # of the schema in the question: enough to be asked, little to read
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
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SchemaFailure:
    name: str
    answer: str
    why: str


@dataclass(frozen=True, slots=True)
class SchemaVerdict:
    """What became of the answers."""

    asked: int
    finished: int
    failures: list[SchemaFailure]

    @property
    def fitting(self) -> int:
        return self.finished - len(self.failures)


def usable(guidance: Guidance, suite: Iterable[SuiteSchema]) -> Iterator[tuple[SuiteSchema, Judge]]:
    """The suite's schemas that can be enforced and judged."""
    for one in suite:
        try:
            guidance.check(Guide("json_schema", json.dumps(one.schema)))
            yield one, Judge(one.schema, one.draft)
        except (InvalidRequest, CannotJudge):
            continue


def answer_schemas(
    llm: LLM,
    chosen: Sequence[tuple[SuiteSchema, Judge]],
    temperature: float,
    tell: Tell,
    max_tokens: int = MAX_TOKENS,
    most_characters: int = MOST_SCHEMA_CHARACTERS,
) -> SchemaVerdict:
    """One answer per schema, all through the engine at once."""
    conversations, params = [], []
    for number, (one, _) in enumerate(chosen):
        text = json.dumps(one.schema)
        question = f"Write one JSON value that fits this JSON schema: {text[:most_characters]}"
        conversations.append([{"role": "user", "content": question}])
        params.append(
            SamplingParams(
                guide=Guide("json_schema", text), temperature=temperature, seed=number, max_tokens=max_tokens
            )
        )
    stage = f"answers at temperature {temperature:g}"
    outputs = llm.chat(
        conversations, params, on_progress=lambda progress: tell(stage, progress.finished, progress.total)
    )
    failures, finished = [], 0
    for (one, judge), output in zip(chosen, outputs, strict=True):
        if output.error is not None:
            finished += 1
            failures.append(SchemaFailure(one.name, "", output.error))
        elif output.samples[0].finish_reason == "stop":
            finished += 1
            if (why := judge.complaint(output.text)) is not None:
                failures.append(SchemaFailure(one.name, output.text, why))
    return SchemaVerdict(len(chosen), finished, failures)


def measure(
    model: str | None, config: EngineConfig, schemas: int, steps: int, seed: int, tell: Tell
) -> list[Row]:
    rows: list[Row] = []
    with LLM(model, config=config, progress=tell) as llm:
        assert llm.engine.guidance is not None
        tell("the JSON Schema Test Suite", 0, 0)
        known = list(usable(llm.engine.guidance, schema_judge.load()))
        chosen = random.Random(seed).sample(known, min(schemas, len(known)))
        rows.append(
            Row("schemas that can be enforced", len(known), note="of the JSON Schema Test Suite, each once")
        )
        rows.append(Row("schemas asked for", len(chosen), must=min(schemas, 200)))
        for temperature in (1.0, 0.0):
            verdict = answer_schemas(llm, chosen, temperature, tell)
            name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            rows += _verdict_rows(name, verdict)
    rows += cost(model, config, steps, tell)
    return rows


def _verdict_rows(name: str, verdict: SchemaVerdict) -> list[Row]:
    told = "; ".join(f"{failure.name}: {failure.why}" for failure in verdict.failures[:5])
    share = verdict.fitting / verdict.finished * 100 if verdict.finished else float("nan")
    return [
        Row(
            f"finished, {name}", verdict.finished, "answers", must=verdict.asked / 4,
            note=f"of {verdict.asked}; the others reached {MAX_TOKENS} tokens",
        ),
        Row(f"finished answers that fit, {name}", share, "%", must=100.0, aim=100.0, note=told),
    ]  # fmt: skip


def cost(model: str | None, config: EngineConfig, steps: int, tell: Tell) -> list[Row]:
    """Two engines with the same prompts, one of them guided, take steps in turn. Nothing is overlapped: what the
    masks cost shows whole."""
    serial = replace(config, overlap=False, max_context=64 + steps + _WARM_UP_STEPS)
    with LLM(model, config=serial, progress=tell) as guided, LLM(model, config=serial, progress=tell) as free:
        _fill(guided, Guide("json_schema", json.dumps(_LONG_FORM)), steps)
        _fill(free, None, steps)
        times: dict[str, list[float]] = {"guided": [], "free": []}
        for number in range(steps):
            tell("steps with and without guides", number, steps)
            order = [("guided", guided), ("free", free)]
            for name, llm in order if number % 2 else order[::-1]:
                began_s = time.perf_counter()
                llm.engine.step()
                if number >= _WARM_UP_STEPS:
                    times[name].append(time.perf_counter() - began_s)
    ratios = [a / b for a, b in zip(times["guided"], times["free"], strict=True)]
    step_ms, guided_ms = (1e3 * statistics.median(times[name]) for name in ("free", "guided"))
    name, pairs = "step with guides / without", f"median of {len(ratios)} pairs"
    return [
        Row(f"step, {BATCH} sequences without guides", step_ms, "ms", "lower"),
        Row(f"step, {BATCH} sequences with guides", guided_ms, "ms", "lower"),
        Row(name, statistics.median(ratios), "×", "lower", must=1 + COST_MUST, note=pairs),
    ]


def _fill(llm: LLM, guide: Guide | None, steps: int) -> None:
    """A full batch, past its prompts."""
    for number in range(BATCH):
        prompt = llm.tokenizer.encode(f"List number {number} of people, robots and animals, as JSON:\n")
        params = SamplingParams(
            guide=guide,
            temperature=1.0,
            seed=number,
            max_tokens=steps + _WARM_UP_STEPS,
            ignore_eos=guide is None,
        )
        llm.engine.add(prompt, params)
    while any(sequence.output_length == 0 for sequence in llm.engine.scheduler.running) or (
        len(llm.engine.scheduler.running) < BATCH
    ):
        llm.engine.step()

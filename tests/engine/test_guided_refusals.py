"""Guided decoding: a guide that cannot be is refused with the reason, and ends nothing else."""

import json
import sys

import pytest

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides.guided import Guidance
from cumulo.errors import InvalidRequest
from tests import processes
from tests.engine.guided_engine import EOS, PROMPT, TOKENIZER, VOCAB, make_engine

pytest.importorskip("llguidance")


def test_beams_and_ignored_ends_cannot_be_guided():
    guide = Guide("regex", "a")
    with pytest.raises(InvalidRequest, match="beam"):
        SamplingParams(guide=guide, beam_width=2)
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(guide=guide, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="kind"):
        Guide("xml", "<a/>")


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


@pytest.mark.long
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
    done = processes.run_program(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout

"""GuideChecker: guides are compiled beside the engine's loop, which is woken when they are."""

from collections.abc import Iterator

import pytest
import zmq

from cumulo.engine.guided import Guidance
from cumulo.engine.params import Guide, SamplingParams
from cumulo.serve.guide_checker import GuideChecker
from cumulo.serve.messages import Submit
from cumulo.serve.model_text import ModelText
from tests.serve.running_server import needs_built_in_model

pytestmark = needs_built_in_model


@pytest.fixture
def checker() -> Iterator[GuideChecker]:
    tokenizer = ModelText.load(None).tokenizer
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield GuideChecker(Guidance(tokenizer, tokenizer.vocab_size, (2,)), context)
    context.destroy(linger=0)


def submit(request_id: str, guide: Guide) -> Submit:
    return Submit(request_id, b"", SamplingParams(guide=guide), stream=False)


def test_guides_come_back_in_order_with_what_is_wrong_with_them(checker: GuideChecker) -> None:
    assert checker.take() == []
    checker.begin(submit("good", Guide("regex", "[a-z]+")))
    checker.begin(submit("bad", Guide("json_schema", '{"type": "frob"}')))
    checker.begin(submit("left", Guide("json_object")))
    assert list(checker.pending) == ["good", "bad", "left"]
    checker.pending["left"] = True  # as an abort does
    taken: list[tuple[Submit, str | None, bool]] = []
    while len(taken) < 3:
        assert checker.bell.poll(30_000), "the loop is not woken"
        taken += checker.take()
    assert [asked.request_id for asked, _, _ in taken] == ["good", "bad", "left"]
    (_, fine, _), (_, refusal, _), (_, also_fine, aborted) = taken
    assert fine is None and also_fine is None and aborted
    assert refusal is not None and "frob" in refusal
    assert checker.checked == 3 and not checker.pending

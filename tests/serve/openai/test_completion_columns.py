"""The columns of /v1/completions' log-probabilities, over any tokens: whole and streamed alike, and never past the
text. The engine's own TextStream makes the text."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.outputs import TextStream
from cumulo.models.text.tokenizer import load_tokenizer
from cumulo.serve.api.openai.logprobs import (
    CompletionColumns,
    completion_spelling,
    echoed_columns,
    joined_columns,
    prompt_logprobs,
)
from cumulo.serve.model_text import ModelText
from tests import thorough
from tests.serve.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(load_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"))))


def entry(token: int, top: tuple[int, ...] = ()) -> TokenLogprobs:
    return TokenLogprobs(token, -float(token), 1, [(other, -float(other)) for other in top])


def bytes_of(spelled: str) -> bytes:
    """What a client makes of a token's spelling."""
    if not spelled.startswith("bytes:"):
        return spelled.encode()
    parts = re.findall(r"\\x([0-9a-f]{2})|(.)", spelled.removeprefix("bytes:"))
    return b"".join(bytes.fromhex(number) if number else plain.encode() for number, plain in parts)


@settings(max_examples=thorough.examples(150), deadline=None)
@given(data=st.data())
def test_streamed_columns_are_the_whole_ones_and_stay_within_the_text(
    data: st.DataObject, text: ModelText
) -> None:
    tokenizer = text.tokenizer
    characters = [tokenizer.encode(character) for character in ("é", "你", "😀", " ", "a", "the", "\n")]
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(characters), st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=2)
            ),
            max_size=12,
        )
    )
    tokens = [token for piece in pieces for token in piece]
    params = SamplingParams(
        stop=tuple(data.draw(st.lists(st.sampled_from(["a", "th", "é", "你 ", " the", "😀"]), max_size=2))),
        skip_special_tokens=data.draw(st.booleans()),
        include_stop=data.draw(st.booleans()),
    )
    start = data.draw(st.integers(0, 3))
    fields: dict[str, Any] = {"skip_special": params.skip_special_tokens, "start": start}
    stream, streamed, told = TextStream(tokenizer, params), CompletionColumns(text, 2, **fields), []
    shown, drawn = start, []
    for token in tokens:
        drawn.append(entry(token, (1, 2)))
        shown += len(stream.push(token))
        streamed.push([drawn[-1]])
        if stream.matched is not None:
            break
        told.append(streamed.next_columns(shown))
    shown += len(stream.finish())
    told.append(streamed.finish(shown))
    assert shown == start + len(stream.text)
    whole = CompletionColumns(text, 2, **fields)
    whole.push(drawn)
    columns = whole.finish(shown)
    assert joined_columns(*filter(None, told)) == columns
    offsets = columns["text_offset"]
    assert offsets == sorted(offsets) and all(start <= offset <= shown for offset in offsets)
    assert len({len(column) for column in columns.values()}) == 1
    for spelled, offset in zip(columns["tokens"], offsets, strict=True):
        if not spelled.startswith(("bytes:", "token_id:", "<|")):
            seen = stream.text[offset - start : offset - start + len(spelled)]
            assert spelled.startswith(seen)  # all of it, unless a stop string cut it
            assert seen == spelled or offset + len(seen) == shown
    if stream.matched is None:
        assert len(offsets) == len(tokens)


def test_a_character_in_several_tokens_begins_where_its_first_token_does(text: ModelText) -> None:
    said = "a 😀é你b"
    tokens = text.tokenizer.encode(said)
    assert len(tokens) > len(said)
    columns = CompletionColumns(text, 0)
    columns.push(map(entry, tokens))
    found = columns.finish(len(said))
    before = b""
    for spelled, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert offset == len(before.decode("utf-8", "ignore"))
        before += bytes_of(spelled)
    assert before.decode() == said


def test_no_two_tokens_of_the_vocabulary_are_spelled_alike(text: ModelText) -> None:
    spelled = [completion_spelling(text, token) for token in range(text.tokenizer.vocab_size + 2)]
    assert len(set(spelled)) == len(spelled)


def test_the_token_itself_is_always_among_the_alternatives(text: ModelText) -> None:
    columns = CompletionColumns(text, 2)
    columns.push([entry(70, (71, 72, 73)), entry(71, (71, 72))])
    first, second = columns.finish(10)["top_logprobs"]
    names = {token: completion_spelling(text, token) for token in (70, 71, 72)}
    assert first == {names[71]: -71.0, names[72]: -72.0, names[70]: -70.0}
    assert second == {names[71]: -71.0, names[72]: -72.0}


def test_an_echoed_prompt_has_offsets_into_what_is_shown(text: ModelText) -> None:
    prompt = [*text.tokenizer.encode("<|im_start|>"), *text.tokenizer.encode("é the")]
    skipped = echoed_columns(text, 0, prompt, [entry(token) for token in prompt[1:]], len("é the"))
    assert skipped["token_logprobs"][0] is None and skipped["top_logprobs"][0] is None
    assert skipped["text_offset"][:2] == [0, 0] and max(skipped["text_offset"]) < len("é the")
    shown = echoed_columns(
        text, 0, prompt, [entry(token) for token in prompt[1:]], len("<|im_start|>é the"), skip_special=False
    )
    assert shown["text_offset"][1] == len("<|im_start|>")


def test_prompt_tables_are_by_token_id_with_ranks(text: ModelText) -> None:
    first, second = prompt_logprobs(text, [TokenLogprobs(70, -5.0, 9, [(71, -1.0), (72, float("-inf"))])], 2)
    assert first is None
    assert second == {
        "71": {"logprob": -1.0, "rank": 1, "decoded_token": text.token_text(71)[0]},
        "72": {"logprob": -9999.0, "rank": 2, "decoded_token": text.token_text(72)[0]},
        "70": {"logprob": -5.0, "rank": 9, "decoded_token": text.token_text(70)[0]},
    }

"""Tokenising piece by piece gives what the `tokenizers` library gives for the whole text."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from cumulo.models.text.fixed_pieces import LONGEST_TEXT, FixedPieces, independent_pieces
from cumulo.models.text.tokenizer import byte_alphabet
from tests import thorough


def byte_level(*added: AddedToken) -> tokenizers.Tokenizer:
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("<", "|")]
    vocabulary = {piece: number for number, piece in enumerate(byte_alphabet())}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    return backend


def marker(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"normalized": False, "special": True, **flags})


MARKERS = ("<|s|>", "<|s|>more", "<|e|>", "|>")
BACKEND = byte_level(*map(marker, MARKERS), AddedToken("later", normalized=True))
FIXED = FixedPieces(BACKEND)
FIXED.keep("<|s|>hell a\n\n<|e|>\n")

texts = st.lists(
    st.one_of(
        st.sampled_from([*MARKERS, "hell a\n\n", "\n", " ", "  ", "7", "later", "<|"]), st.text(max_size=5)
    )
).map("".join)


@settings(max_examples=thorough.examples(300), deadline=None)
@given(texts)
def test_pieces_have_the_ids_of_the_whole(text: str) -> None:
    assert FIXED.encode(text) == BACKEND.encode(text, add_special_tokens=False).ids


def test_a_text_full_of_markers_is_tokenised_in_one_piece() -> None:
    text = "<|s|>hell" * LONGEST_TEXT
    assert FIXED.encode(text) == BACKEND.encode(text, add_special_tokens=False).ids


def test_tokenizers_whose_pieces_depend_on_each_other_are_recognised() -> None:
    assert independent_pieces(BACKEND)
    assert not independent_pieces(byte_level())  # nothing to split at
    for flag in ("lstrip", "rstrip", "single_word"):
        assert not independent_pieces(byte_level(marker("<|s|>", **{flag: True}))), flag
    looks_back = byte_level(marker("<|s|>"))
    looks_back.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert not independent_pieces(looks_back)
    normalised = byte_level(marker("<|s|>"))
    normalised.normalizer = normalizers.Prepend("x")
    assert not independent_pieces(normalised)


@pytest.mark.parametrize("add_special", [False, True])
def test_the_builtin_model_tokenises_conversations_as_its_backend_does(add_special: bool) -> None:
    from cumulo.models.files.gguf_file import open_gguf
    from cumulo.models.files.hub import resolve
    from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(open_gguf(resolve(None).path).metadata)
    tokenizer.prepare_chats()
    for content in ("", "Why is the sky blue?", "2 + 2\n\n", "<|im_end|><|im_start|>", " naïve 日本 \u200b"):
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}])
        expected = tokenizer.backend.encode(text, add_special_tokens=add_special).ids
        assert tokenizer.encode(text, add_special=add_special) == expected

"""Tokenizers from GGUF vocabularies: SmolLM2's and every word rule against transformers, SentencePiece's
against the sentencepiece library itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from cumulo.errors import ModelError
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import built_in_model
from cumulo.models.text.tokenizer_gguf import _WORD_RULES, tokenizer_from_gguf
from tests import peers, thorough
from tests.models.cut_smollm import cut_smollm
from tests.models.gguf_writing import write_gguf
from tests.models.vocabularies import TEXT, byte_level_metadata, sentencepiece_metadata, trained_sentencepiece

pytestmark = pytest.mark.long

CORPUS = [
    *TEXT[:7],
    "",
    " ",
    "\n\n\n  \n\t \r\n x",
    "a  b   c    d\u00a0e\u3000f\u2003g",
    "1 22 333 4444 55555 0x1F 1e-9 v2.0.1 2024/12/31",
    "😀 👩‍👩‍👧‍👦 🇫🇷 ☕️ e\u0301 क्षि ไทย العربية עברית Ελληνικά Привет",
    "don't I'LL you'Ve 'tis 'S it''s",
    "```python\nclass A(B):\n    def __init__(self, *args, **kwargs) -> None: ...\n```",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start |>",
    "x" * 500 + " " * 100,
    "\x00\x01\x7f\u200b\ufeff",
]
TEXTS = st.text(
    st.one_of(st.sampled_from(" \n\tabcthe'sS012.,!?_éß日本語한😀̈"), st.characters(codec="utf-8")),
    max_size=50,
)


@pytest.fixture(scope="module", params=["first tokens", pytest.param("whole", marks=pytest.mark.thorough)])
def smollm(request, tmp_path_factory):
    path = built_in_model()
    if request.param == "first tokens":  # the other library takes half a minute to read them all
        path = cut_smollm(tmp_path_factory.mktemp("cut") / "cut.gguf")
    return (
        tokenizer_from_gguf(open_gguf(path).metadata),
        peers.transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    )


def test_smollm2_encodes_and_decodes_as_transformers_does(smollm):
    ours, theirs = smollm
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, add_special=True) == theirs.encode(text), text
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
@settings(max_examples=thorough.examples(200), deadline=None)
def test_random_ids_of_smollm2_decode_as_in_transformers(smollm, ids, skip):
    ours, theirs = smollm
    expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip) == expected


def test_smollm2_splits_every_kind_of_digit_as_its_release_does():
    """transformers reads the GGUF file without the digit rule that the model's tokenizer.json has."""
    metadata = open_gguf(built_in_model()).metadata
    ours = tokenizer_from_gguf(metadata)
    pieces = metadata["tokenizer.ggml.tokens"]
    release = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    release.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*CORPUS[:15], "½ ² ٣٤ Ⅷ x²+y² 1½", " 7 77  777"):
        assert ours.encode(text) == release.encode(text).ids, text


def test_smollm2_conversations_are_those_of_transformers(smollm):
    ours, theirs = smollm
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert (
        ours.encode_chat(messages)
        == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    assert ours.eos_ids[0] == theirs.eos_token_id
    assert ours.decode([ours.eos_ids[0]], skip_special=False) == "<|im_end|>"
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "default"])
def test_word_rules_give_the_ids_that_transformers_gives_for_the_same_file(pre, tmp_path):
    metadata = byte_level_metadata(pre) | {"general.architecture": "llama"}
    write_gguf(tmp_path / "m.gguf", metadata)
    theirs = peers.transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = tokenizer_from_gguf(open_gguf(tmp_path / "m.gguf").metadata)
    for text in CORPUS:
        if pre == "qwen2":  # Qwen's own tokenizer composes characters first, which transformers omits here
            text = text.replace("e\u0301", "é")
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def words(pre: str, text: str) -> list[str]:
    """The words a rule cuts a text into."""
    backend = tokenizer_from_gguf(byte_level_metadata(pre)).backend
    spelled = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [decoders.ByteLevel().decode([piece]) for piece in spelled]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        (
            "deepseek-v3",
            "ab 12345 漢字かな! .foo(x)",
            ["ab", " ", "123", "45", " ", "漢字かな", "!", " .", "foo", "(x", ")"],
        ),
        (
            "deepseek-llm",
            "Hi there\n\n123 漢字。",
            ["Hi", " there", "\n", "\n", "1", "2", "3", " ", "漢字", "。"],
        ),
        ("deepseek-coder", "x = 10\n\ty+1", ["x", " = ", "1", "0", "\n", "\ty", "+", "1"]),
        ("smollm", "a 12 bc", ["a", " ", "1", "2", " bc"]),
        ("llama-bpe", "I'M 1234567 ok", ["I", "'M", " ", "123", "456", "7", " ok"]),
        ("qwen2", "I'M 123 ok", ["I", "'M", " ", "1", "2", "3", " ok"]),
    ],
)
def test_word_rules_cut_as_their_models_do(pre, text, expected):
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", sorted(_WORD_RULES))
@given(text=TEXTS)
@settings(max_examples=thorough.examples(30), deadline=None)
def test_every_word_rule_loses_nothing(pre, text):
    tokenizer = _of_rule(pre)
    normalizer = tokenizer.backend.normalizer
    expected = normalizer.normalize_str(text) if normalizer else text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == expected


_of_rules = {}


def _of_rule(pre):
    if pre not in _of_rules:
        _of_rules[pre] = tokenizer_from_gguf(byte_level_metadata(pre))
    return _of_rules[pre]


def test_control_and_user_defined_tokens_stay_whole_and_only_control_tokens_are_special():
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|><think>b"


@pytest.mark.parametrize(("flag", "expected"), [(True, True), (False, False), (None, False)])
def test_the_begin_token_is_added_where_the_file_says_so(flag, expected):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**{"tokenizer.ggml.add_bos_token": flag}))
    ids = tokenizer.encode("a", add_special=True)
    assert (ids[0] == tokenizer.bos_id) is expected
    assert tokenizer.bos_id not in tokenizer.encode("a")


# -- SentencePiece ------------------------------------------------------------------------------------------

PREFIXED = tokenizer_from_gguf(sentencepiece_metadata())
PLAIN = tokenizer_from_gguf(sentencepiece_metadata(add_dummy_prefix=False))


@pytest.mark.parametrize("prefix", [True, False], ids=["prefixed", "plain"])
@given(text=TEXTS)
@settings(max_examples=thorough.examples(300), deadline=None)
def test_sentencepiece_ids_and_texts_are_those_of_the_library(prefix, text):
    text = text.replace("<", "").replace("▁", "").replace("\x00", "")  # the library reads these as markup
    ours, theirs = (PREFIXED if prefix else PLAIN), trained_sentencepiece(prefix)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text


def test_sentencepiece_corpus_ids_are_those_of_the_library():
    processor = trained_sentencepiece()
    for text in CORPUS:
        if "<|" not in text and "\x00" not in text:
            assert PREFIXED.encode(text) == processor.encode(text), text
    assert PREFIXED.encode("the", add_special=True) == [processor.bos_id(), *processor.encode("the")]


def test_unknown_characters_become_bytes_and_come_back():
    ids = PREFIXED.encode("☃")
    assert [PREFIXED.token_bytes(token) for token in ids] == [b" ", b"\xe2", b"\x98", b"\x83"]
    assert PREFIXED.decode(ids) == "☃"


# -- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.pre": "mystery"}, "mystery"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "ab"),
        ({"tokenizer.ggml.merges": ["nowhere found"]}, "vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_a_model_error_that_says_why(changes, names):
    with pytest.raises(ModelError, match=names):
        tokenizer_from_gguf(byte_level_metadata(**changes))


def test_special_ids_outside_the_vocabulary_are_not_taken():
    changes = {f"tokenizer.ggml.{name}_token_id": 10**6 for name in ("bos", "eos", "eot")}
    tokenizer = tokenizer_from_gguf(byte_level_metadata(**changes))
    assert tokenizer.bos_id is None
    assert all(token < tokenizer.vocab_size for token in tokenizer.eos_ids)

"""Tokenizers from tokenizer.json and its companions: the same ids and texts as transformers gives."""

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from cumulo.errors import InvalidRequest, ModelError, PromptTooLong
from cumulo.models.text import control_tokens
from cumulo.models.text import tokenizer as tokenizer_module
from cumulo.models.text.tokenizer import load_tokenizer
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from tests import peers, thorough
from tests.models.vocabularies import TEXT, byte_level_metadata, sentencepiece_metadata

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
SAMPLES = [
    *TEXT[:7],
    "",
    " ",
    "😀👩‍👧 \u0301e\u0308",
    "<think>a<|im_end|> b",
    "</s>x<s> y",
    "▁x",
    "\x00\x7f\u200b",
]


@pytest.fixture(scope="module")
def byte_level_folder(tmp_path_factory):
    """A folder as a model release has it: tokenizer.json, its configuration, a template file."""
    folder = tmp_path_factory.mktemp("byte_level")
    backend = tokenizer_from_gguf(byte_level_metadata()).backend
    peers.transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    metadata = sentencepiece_metadata()
    backend = tokenizer_from_gguf(metadata).backend
    description = json.loads(backend.to_str())["model"]
    peers.transformers.LlamaTokenizer(
        vocab=description["vocab"],
        merges=[tuple(merge) for merge in description["merges"]],
        add_bos_token=True,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(params=["byte_level_folder", "sentencepiece_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


def test_ids_and_texts_are_those_of_transformers(folder):
    ours, theirs = load_tokenizer(folder), peers.transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=True) == theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == expected


@given(ids=st.lists(st.integers(0, 703), max_size=30), skip=st.booleans())
@settings(max_examples=thorough.examples(200), deadline=None)
def test_random_byte_level_ids_decode_as_in_transformers(byte_level_folder, ids, skip):
    ours, theirs = _pair(byte_level_folder)
    assert ours.decode(ids, skip) == theirs.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


_pairs = {}


def _pair(folder):
    if folder not in _pairs:
        _pairs[folder] = load_tokenizer(folder), peers.transformers.AutoTokenizer.from_pretrained(folder)
    return _pairs[folder]


def test_a_conversation_is_encoded_as_in_transformers(byte_level_folder):
    ours, theirs = _pair(byte_level_folder)
    messages = [{"role": "user", "content": "the cat < 12 > [it]"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.encode_chat(messages) == theirs.apply_chat_template(messages)["input_ids"]
    messages = [{"role": "user", "content": "the cat <think> 12"}]
    _, recognised = ours.render_chat(messages, parse_special_tokens=True)
    assert recognised == theirs.apply_chat_template(messages)["input_ids"]


def test_a_tokenizer_without_a_template_says_what_to_do_instead(sentencepiece_folder):
    tokenizer = load_tokenizer(sentencepiece_folder)
    with pytest.raises(InvalidRequest, match="--chat-template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    tokenizer.use_chat_template(TEMPLATE)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>user: hi</s>"


def test_a_template_file_wins_over_the_configuration_and_named_templates_are_known(
    byte_level_folder, tmp_path
):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((byte_level_folder / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "F"


def test_every_end_that_any_file_names_is_an_end(byte_level_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((byte_level_folder / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 6}')
    tokenizer = load_tokenizer(tmp_path)
    assert set(tokenizer.eos_ids) == {5, 6, tokenizer.encode("<|im_end|>")[0]}
    assert tokenizer.bos_id == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.bos_id in tokenizer.special_ids
    assert tokenizer.encode("<think>")[0] not in tokenizer.special_ids


def test_a_begin_token_that_only_the_configuration_asks_for_is_added_once(byte_level_folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((byte_level_folder / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a", add_special=True) == [tokenizer.bos_id, *tokenizer.encode("a")]
    assert tokenizer.encode("<|im_start|>a", add_special=True) == tokenizer.encode("<|im_start|>a")
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special=False)


def test_joined_token_bytes_are_the_text(folder):
    tokenizer = load_tokenizer(folder)
    for text in TEXT[:7]:
        spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        # Llama's tokenizer.json puts a space first, unless one is there already.
        assert spelled.decode() == (" " if tokenizer.space_prefix and text[0] != " " else "") + text
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""


@pytest.mark.parametrize("text", ["ok \ud800", "\udfff", b"\xff\xfe", b"ab\xe2\x82", 7, None])
def test_text_that_is_not_unicode_is_an_invalid_request(folder, text):
    with pytest.raises(InvalidRequest):
        load_tokenizer(folder).encode(text)


def test_valid_bytes_are_taken_as_text(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("naïve 日本".encode()) == tokenizer.encode("naïve 日本")


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "list", "decoder"])
def test_a_missing_or_damaged_tokenizer_file_is_a_model_error(byte_level_folder, tmp_path, damage):
    content = (byte_level_folder / "tokenizer.json").read_text()
    if damage == "decoder":
        content = json.dumps(json.loads(content) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}})
    changed = {"cut": content[: len(content) // 2], "empty": "", "list": "[]", "decoder": content}
    if damage != "missing":
        (tmp_path / "tokenizer.json").write_text(changed[damage])
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\x00"])
def test_a_damaged_companion_file_is_a_model_error_that_names_it(byte_level_folder, tmp_path, content):
    (tmp_path / "tokenizer.json").write_text((byte_level_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_stored_in_a_tokenizer_file_are_not_applied(byte_level_folder, tmp_path):
    content = json.loads((byte_level_folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(tmp_path).encode(TEXT[0])) > 4


def test_an_added_token_of_latin_letters_is_spelled_as_text(byte_level_folder, tmp_path):
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    backend = tokenizer.backend
    backend.add_tokens([AddedToken("é", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode("café")) == "café"


# -- long texts ----------------------------------------------------------------------------------------------
_WORDLESS = "".join(chr(0x4E00 + 7 * place % 20_000) for place in range(200_000))  # no spaces: one word


def test_other_threads_run_while_a_long_text_is_encoded(byte_level_folder):
    tokenizer = load_tokenizer(byte_level_folder)
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(_WORDLESS)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    started_s = last_s = time.perf_counter()
    longest_pause_s = 0.0
    while not ended.is_set():
        now_s = time.perf_counter()
        longest_pause_s, last_s = max(longest_pause_s, now_s - last_s), now_s
    thread.join()
    assert longest_pause_s < (last_s - started_s) / 2


def test_a_text_that_is_too_long_is_read_up_to_the_limit(byte_level_folder, monkeypatch):
    tokenizer, read = load_tokenizer(byte_level_folder), []

    def backend_ids(backend, text, add_special=False):
        read.append(len(text))
        return control_tokens.backend_ids(backend, text, add_special)

    monkeypatch.setattr(tokenizer_module, "backend_ids", backend_ids)
    for text in (_WORDLESS, "word " * 40_000, "e\u0301" * 100_000):
        read.clear()
        tokens = len(tokenizer.encode(text))
        assert read.pop() == len(text)
        with pytest.raises(PromptTooLong, match="more than 1,000 tokens"):
            tokenizer.encode(text, most_tokens=1000)
        assert sum(read) <= 0.4 * len(text)
        assert len(tokenizer.encode(text, most_tokens=tokens)) == tokens


@pytest.fixture(scope="module")
def byte_level_tokenizer(byte_level_folder):
    return load_tokenizer(byte_level_folder)


@settings(max_examples=60 if thorough else 15, deadline=None)
@given(
    st.text(alphabet="ab é\u4e00\u3042\u0301\n<", max_size=30).filter(bool),
    st.integers(1, 300),
    st.integers(1, 400),
)
def test_no_text_that_fits_is_refused(byte_level_tokenizer, piece, repeats, shift):
    text = piece * repeats
    tokens = byte_level_tokenizer.encode(text)
    assert byte_level_tokenizer.encode(text, most_tokens=len(tokens) + shift - 1) == tokens

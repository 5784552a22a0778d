"""Small vocabularies as GGUF metadata, made by the libraries that train real ones. For tokenizer tests."""

import io
import json
from functools import cache
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

TEXT = [
    "the cat sat on the mat and the dog saw that the cat was there, wasn't it?",
    "def add(first, second):\n    return first + second  # 12345 + 678 = 13023\n\n\n",
    "She said: “naïve café”, and he'd answered — we've seen 3 of 10 cases, you'll say.",
    "   leading spaces,\ttabs\t\tand    runs of    spaces   ",
    "これは日本語のテキストです。 中文也在这里，还有한국어.",
    "import numpy as np\nfor index in range(100):\n\tprint(index, end=' ')\r\n",
    "HELLO World hello WORLD I'LL don't THEY'RE 2024-01-31 1,000,000.50 €5 £6",
] * 3


@cache
def _trained_bpe() -> tuple[tuple[str, ...], tuple[str, ...]]:
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.train_from_iterator(TEXT, trainer)
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return tuple(sorted(vocabulary, key=vocabulary.__getitem__)), tuple(pairs)


def byte_level_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A trained byte-level BPE, then three control tokens and one user-defined one."""
    pieces, merges = _trained_bpe()
    extra = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*pieces, *extra],
        "tokenizer.ggml.token_type": [NORMAL] * len(pieces) + [CONTROL] * 3 + [USER_DEFINED],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(pieces) + 1,
        "tokenizer.ggml.eos_token_id": len(pieces) + 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


@cache
def trained_sentencepiece(add_dummy_prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in TEXT for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(add_dummy_prefix: bool = True, **changes: Any) -> dict[str, Any]:
    processor = trained_sentencepiece(add_dummy_prefix)
    size = processor.get_piece_size()

    def kind(index: int) -> int:
        if processor.is_unknown(index):
            return UNKNOWN
        if processor.is_control(index):
            return CONTROL
        if processor.is_byte(index):
            return BYTE
        return UNUSED if processor.is_unused(index) else NORMAL

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(size)],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": add_dummy_prefix,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}

"""The tokenizer inside a GGUF file: vocabulary, merges or scores, and flags under `tokenizer.ggml.*`. Called
by `load_model`.

Two kinds are read. "gpt2" is byte-level BPE: merges are listed, and `tokenizer.ggml.pre` names the rule by
which text is cut into words first. "llama" is SentencePiece BPE: no merges are listed, but joining two
pieces is allowed when the result is a piece, best score first, so the merges follow from the scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from cumulo.errors import ModelError
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.models.text.tokenizer_file import check_tokens, is_failure

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
# Control tokens that end a turn in some family; files often name only one of theirs as eos.
_TURN_ENDS = frozenset(
    [
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    ]
)

_MOST_CUTS = (
    1 << 26
)  # characters of all halves of all SentencePiece tokens; 256,000 tokens of a model have 16 million
# How text is cut into words before merging. These are the rules in the tokenizer.json of the families.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
# Cased letters as of the Unicode version DeepSeek listed them from: Georgian had no case yet.
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}]]"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, _DIGIT)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_WORD_RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"], (_GPT2,)),
    **dict.fromkeys(
        ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], (_DIGIT, _GPT2)
    ),
    **dict.fromkeys(
        ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "dbrx"], (_LLAMA3,)
    ),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"], (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], _DEEPSEEK_V3),
}
_WHOLE_WORDS_FIRST = frozenset(
    ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "tekken"]
)
_COMPOSED = frozenset(["qwen2", "deepseek-r1-qwen"])  # these normalise text to NFC first


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ModelError where the vocabulary is missing, inconsistent or of an unknown kind."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file's tokenizer is {model!r}; known: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    check_tokens("the GGUF file", tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type does not have one entry per token; the file is damaged")
    try:
        backend = (
            _byte_level(metadata, tokens) if model == "gpt2" else _sentencepiece(metadata, tokens, types)
        )
        special = [i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
        plain = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
        backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special if tokens[i]])
        backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in plain if tokens[i]])
        pre = metadata.get("tokenizer.ggml.pre", "default")
        begins = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _WHOLE_WORDS_FIRST)
        bos_id, eos_id = _token_id(metadata, "bos", tokens), _token_id(metadata, "eos", tokens)
        before = [bos_id] if begins and bos_id is not None else []
        after = [eos_id] if metadata.get("tokenizer.ggml.add_eos_token") and eos_id is not None else []
        backend.post_processor = _surround(tokens, before, after)
    except ModelError:
        raise
    except BaseException as error:  # the tokenizers library raises bare Exception, or panics
        if not is_failure(error):
            raise
        raise ModelError(f"the GGUF file's vocabulary cannot be used: {error}") from error
    ends = [_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    ends += [i for i in special if tokens[i] in _TURN_ENDS]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        kind="byte_level" if model == "gpt2" else "sentencepiece",
        pieces=tokens,
        added_ids=special + plain,
        special_ids=special,
        bos_id=bos_id,
        eos_ids=[end for end in ends if end is not None],
        space_prefix=model == "llama" and _adds_space(metadata),
        special_texts=_special_texts(metadata, tokens),
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"the GGUF file has no usable tokenizer.ggml.{name}, so text cannot be encoded")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _adds_space(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _surround(tokens: Sequence[str], before: list[int], after: list[int]) -> processors.TemplateProcessing:
    names = [tokens[i] for i in before], [tokens[i] for i in after]
    return processors.TemplateProcessing(
        single=[*names[0], "$A", *names[1]], special_tokens=[(tokens[i], i) for i in {*before, *after}]
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORD_RULES:
        raise ModelError(
            f"the GGUF file cuts text into words by the unknown rule {pre!r} (tokenizer.ggml.pre); "
            f"known: {', '.join(_WORD_RULES)}. The model's safetensors folder brings its own tokenizer.json"
        )
    merges = []
    for line in _strings(metadata, "merges"):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ModelError(f"tokenizer.ggml.merges has the entry {line!r}, which is not a pair")
        merges.append((left, right))
    vocabulary = {piece: index for index, piece in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    )
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in _WORD_RULES[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()  # for whoever saves the backend; `Tokenizer` decodes by itself
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores does not have one entry per token; the file is damaged")
    vocabulary = {piece: index for index, piece in enumerate(tokens)}
    joinable = {
        piece
        for piece, kind in zip(tokens, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    if (work := sum(len(piece) ** 2 for piece in joinable)) > _MOST_CUTS:
        raise ModelError(
            f"the GGUF file's tokens are so long that finding their parts takes {work:,} steps; "
            f"{_MOST_CUTS:,} is the most"
        )
    ranked: list[tuple[float, int, str, str]] = []
    for piece in joinable:
        index = vocabulary[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in joinable and right in joinable:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    unknown = _token_id(metadata, "unknown", tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # Applied to each stretch between special tokens, as SentencePiece itself does to every text it is given.
    prefix = [normalizers.Prepend("▁")] if _adds_space(metadata) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if _adds_space(metadata) else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _special_texts(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{name}_token": _token_id(metadata, key, tokens) for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}

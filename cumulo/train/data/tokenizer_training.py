"""Make a tokenizer for a new model: plain bytes, or byte-pair encoding trained on the data. Called by `prepare.py`.

Both are byte-level (Radford et al. 2019): every text can be written, and `cumulo.models.text.tokenizer` and
`transformers` read the saved folder.
"""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from cumulo.models.files.json_file import write_json
from cumulo.models.text.tokenizer import byte_alphabet

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# A model that has only read texts continues what it is given; a conversation is one text to it.
CONTINUE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """256 bytes and the special tokens: nothing to train, sequences are as long as the text."""
    byte_of = byte_alphabet()
    alphabet = sorted(byte_of, key=byte_of.__getitem__)
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    return _finished(backend, use_regex=False)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-pair encoding (Sennrich et al. 2016) with at most `vocab_size` entries, special tokens included."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _finished(backend, use_regex=True)


def _finished(backend: tokenizers.Tokenizer, use_regex: bool) -> tokenizers.Tokenizer:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend


def save_tokenizer(backend: tokenizers.Tokenizer, folder: Path, chat: bool) -> None:
    """tokenizer.json and what readers want beside it. `chat`: the model is taught to answer in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END if chat else END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    write_json(folder / "tokenizer_config.json", config)
    template = CHAT_TEMPLATE if chat else CONTINUE_TEMPLATE
    (folder / "chat_template.jinja").write_text(template, "utf-8")

"""Before the first step: tokenizer, dataset and the model's spec, from a configuration. Called by the trainer.

Everything is kept in the run's folder, so that a resumed run sees what the first one saw.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from cumulo.errors import ConfigError
from cumulo.models.files.hub import resolve
from cumulo.models.files.json_file import write_json
from cumulo.models.files.load import LoadedModel, load_model
from cumulo.models.text.tokenizer import Tokenizer, byte_alphabet, load_tokenizer
from cumulo.spec.check import checked
from cumulo.spec.model import ModelSpec
from cumulo.spec.to_huggingface import config_from_spec
from cumulo.train.data.dataset_build import build_dataset, find_files, pieces_of, read_documents
from cumulo.train.data.packing import TokenDataset
from cumulo.train.decide.config import TrainConfig, check_layout, new_spec

TRAINING_TEXT_BYTES = 32 << 20  # of text that a BPE tokenizer learns from: more changes it little
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    spec: ModelSpec
    tokenizer_folder: Path
    dataset: TokenDataset
    start: LoadedModel | None  # the model whose weights are the first ones


def prepare(config: TrainConfig, progress: Progress) -> Prepared:
    folder = Path(config.folder)
    find_files(config.data.sources)  # a missing dataset is better refused before a model is loaded
    start = None
    if config.model.start_from is not None:
        progress("loading the model", 0, 0)
        start = load_model(resolve(config.model.start_from).path, keep_quantised=False)
    tokenizer_folder = folder / "tokenizer"
    if not (tokenizer_folder / "tokenizer.json").is_file():
        progress("preparing the tokenizer", 0, 0)
        _make_tokenizer(config, start, tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    if start is None:
        spec = checked(new_spec(config, tokenizer.vocab_size, tokenizer.eos_ids), "the configuration's model")
    else:
        spec = replace(start.spec, dtype=config.dtype)
    check_layout(config, spec)
    if config.data.sequence_length > spec.max_context:
        raise ConfigError(
            f"data.sequence_length {config.data.sequence_length} is longer than the model's context of "
            f"{spec.max_context}; lower it to that"
        )
    config_from_spec(spec)  # a model that could not be exported is refused now, not after hours of training
    data = build_dataset(
        folder / "data",
        config.data.sources,
        tokenizer_folder,
        text_field=config.data.text_field,
        chat=config.data.format == "chat",
        workers=config.data.workers,
        progress=progress,
    )
    return Prepared(spec, tokenizer_folder, TokenDataset(data), start)


def _make_tokenizer(config: TrainConfig, start: LoadedModel | None, folder: Path) -> None:
    wanted, chat = config.data.tokenizer, config.data.format == "chat"
    if start is not None and start.tokenizer is not None:
        _save_loaded(start.tokenizer, folder, chat)
    elif wanted.start_from is not None:
        _save_loaded(load_tokenizer(Path(wanted.start_from).expanduser()), folder, chat)
    else:
        size = wanted.vocab_size if wanted.kind == "bpe" else 0
        trained_tokenizer(folder, config.data.sources, config.data.text_field, size, chat)


def trained_tokenizer(
    folder: Path, sources: Sequence[str], text_field: str, vocab_size: int, chat: bool = False
) -> None:
    """A new tokenizer for these sources; `vocab_size` 0: plain bytes."""
    backend = byte_tokenizer()
    if vocab_size:
        backend = bpe_tokenizer(_some_text(sources, text_field, chat), vocab_size)
    save_tokenizer(backend, folder, chat)


def _some_text(sources: Sequence[str], text_field: str, chat: bool) -> Iterator[str]:
    """Documents from all over the data, up to a size: every n-th piece."""
    pieces = pieces_of(find_files(sources))
    total = sum(piece.end - piece.begin for piece in pieces)
    every = max(1, total // TRAINING_TEXT_BYTES)
    for piece in pieces[::every]:
        for found in read_documents(piece, text_field, chat):
            yield "\n".join(message["content"] for message in found) if chat else found


def _save_loaded(tokenizer: Tokenizer, folder: Path, chat: bool) -> None:
    """An existing model's tokenizer as a folder of our own; a model without a template gets one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_texts}
    if "eos_token" not in config and tokenizer.eos_ids:
        config["eos_token"] = tokenizer.decode([tokenizer.eos_ids[0]], skip_special=False)
    write_json(folder / "tokenizer_config.json", config)
    template = CHAT_TEMPLATE if chat else CONTINUE_TEMPLATE
    if tokenizer.chat_template is not None:
        template = tokenizer.chat_template.source
    (folder / "chat_template.jinja").write_text(template, "utf-8")


# Make a tokenizer for a new model: plain bytes, or byte-pair encoding trained on the data. Called by
# `prepare.py`.
#
# Both are byte-level (Radford et al. 2019): every text can be written, and `cumulo.models.text.tokenizer` and
# `transformers` read the saved folder.

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

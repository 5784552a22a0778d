"""The way from files to batches: nothing lost, nothing repeated, nothing across documents, the same every time."""

import json
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cumulo.errors import ConfigError, TrainingError
from cumulo.models.text.tokenizer import load_tokenizer
from cumulo.train.data import dataset_build
from cumulo.train.data.conversations import as_messages
from cumulo.train.data.dataset_build import (
    STANDARD_LIBRARY,
    build_dataset,
    cut_long,
    find_files,
    pieces_of,
    read_documents,
)
from cumulo.train.data.packing import IGNORED, BatchLoader, Packing, TokenDataset, split_documents
from cumulo.train.data.prepare import bpe_tokenizer, byte_tokenizer, save_tokenizer

TEXTS = [f"Document {n}: " + "grüße 🌍 " * (n % 7) + "x" * n for n in range(60)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer", chat=False)
    return tmp_path / "tokenizer"


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def texts_of(dataset: TokenDataset, tokenizer: Path) -> list[str]:
    decoder = load_tokenizer(tokenizer)
    parts = np.split(dataset.tokens, dataset.starts[1:-1])
    assert all(part[-1] == decoder.eos_ids[0] for part in parts)
    return [decoder.decode(part.tolist()) for part in parts]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_document_is_in_the_dataset_once_and_in_order(
    workers: int, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_build, "PIECE_BYTES", 1000)  # many pieces, cut anywhere in a line
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    built = build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=workers)
    dataset = TokenDataset(built)
    assert dataset.tokens.dtype == np.uint16
    assert texts_of(dataset, tokenizer) == TEXTS
    assert sorted(path.name for path in built.iterdir()) == ["dataset.json", "documents.npy", "tokens.bin"]
    assert not list(tmp_path.glob("*.building"))


def test_an_interrupted_build_goes_on_where_it_was(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_build, "PIECE_BYTES", 500)
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    done: list[int] = []
    original = dataset_build.tokenise_shard

    def failing(task: object, work: Path, index: int, pieces: object) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(index)
        original(task, work, index, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset_build, "tokenise_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1)
    assert not (tmp_path / "set").exists()
    first, done[:] = list(done), []

    def counting(task: object, work: Path, index: int, pieces: object) -> None:
        done.append(index)
        original(task, work, index, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset_build, "tokenise_shard", counting)
    build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1)
    assert set(first).isdisjoint(done)
    assert texts_of(TokenDataset(tmp_path / "set"), tokenizer) == TEXTS
    done.clear()
    build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1)
    assert done == []  # it was there already
    write_jsonl(source, TEXTS[:10])
    build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1)
    assert texts_of(TokenDataset(tmp_path / "set"), tokenizer) == TEXTS[:10]


def test_text_files_and_parquet_are_read_too(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS[:5]):
        (folder / f"{number}.txt").write_text(text, "utf-8")
    dataset = TokenDataset(build_dataset(tmp_path / "a", [str(folder)], tokenizer))
    assert texts_of(dataset, tokenizer) == TEXTS[:5]
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS}), tmp_path / "rows.parquet", row_group_size=7)
    dataset = TokenDataset(
        build_dataset(tmp_path / "b", [str(tmp_path / "rows.parquet")], tokenizer, workers=1)
    )
    assert texts_of(dataset, tokenizer) == TEXTS


def test_wrong_sources_are_named(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match="no dataset at '/nowhere'"):
        build_dataset(tmp_path / "set", ["/nowhere"], tokenizer)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(TrainingError, match=r"bad.jsonl, line 2: .*'text'.* has: txt"):
        build_dataset(tmp_path / "set", [str(bad)], tokenizer, workers=1)
    (tmp_path / "latin.txt").write_bytes(b"gr\xfc\xdfe")
    with pytest.raises(TrainingError, match=r"latin.txt is not UTF-8 text \(byte 2\)"):
        build_dataset(tmp_path / "set", [str(tmp_path / "latin.txt")], tokenizer, workers=1)


def test_a_damaged_dataset_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    built = build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1)
    tokens = (built / "tokens.bin").read_bytes()
    (built / "tokens.bin").write_bytes(tokens[:-2])
    with pytest.raises(TrainingError, match="is damaged"):
        TokenDataset(built)
    (built / "tokens.bin").unlink()
    with pytest.raises(TrainingError, match="not a complete dataset"):
        TokenDataset(built)


@pytest.mark.long
def test_the_standard_library_is_found_without_its_tests() -> None:
    files = find_files([STANDARD_LIBRARY])
    assert len(files) > 300
    assert any(file.name == "argparse.py" for file in files)
    assert not any("test" in file.parts or "site-packages" in file.parts for file in files)
    (piece,) = pieces_of([file for file in files if file.name == "argparse.py"])
    assert "class ArgumentParser" in next(read_documents(piece, "text", chat=False))


# -- batches ------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: Path) -> TokenDataset:
    source = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    return TokenDataset(build_dataset(tmp_path / "set", [str(source)], tokenizer, workers=1))


def test_an_epoch_has_every_token_once_but_for_less_than_a_row(dataset: TokenDataset) -> None:
    packing = Packing(dataset, 32, seed=3)
    for epoch in (0, 1):
        first = epoch * packing.samples_per_epoch
        tokens = packing.batch(first, packing.samples_per_epoch).tokens
        missing = Counter(dataset.tokens.tolist()) - Counter(tokens.flatten().tolist())
        assert not Counter(tokens.flatten().tolist()) - Counter(dataset.tokens.tolist())
        assert missing.total() <= 32
    assert not np.array_equal(packing.batch(0, 8).tokens, packing.batch(packing.samples_per_epoch, 8).tokens)


def test_targets_are_the_next_token_of_the_same_document(dataset: TokenDataset) -> None:
    batch = Packing(dataset, 48, seed=1).batch(5, 20)
    starts = set(batch.document_starts.tolist())
    flat, targets, positions = batch.tokens.flatten(), batch.targets.flatten(), batch.positions.flatten()
    assert len(starts) > 25  # rows with several documents are among them
    for place in range(len(flat)):
        assert (positions[place] == 0) == (place in starts)
        if place + 1 < len(flat) and (place + 1) % 48:
            assert targets[place] == (IGNORED if place + 1 in starts else flat[place + 1])
    # An end token is never followed by anything.
    assert (targets[flat == 256] == IGNORED).all()
    assert batch.loss_tokens == (targets != IGNORED).sum()


def test_a_sample_does_not_depend_on_who_asks(dataset: TokenDataset) -> None:
    whole = Packing(dataset, 32, seed=3).batch(0, 40)
    parts = [Packing(dataset, 32, seed=3).batch(first, 8) for first in range(0, 40, 8)]
    assert np.array_equal(np.concatenate([part.targets for part in parts]), whole.targets)
    for number, part in enumerate(parts):
        cut = whole.rows(8 * number, 8 * number + 8)
        assert np.array_equal(cut.tokens, part.tokens)
        assert np.array_equal(cut.document_starts, part.document_starts)
        assert cut.loss_tokens == part.loss_tokens


def test_the_loader_yields_the_batches_in_order_and_ends(dataset: TokenDataset) -> None:
    packing = Packing(dataset, 32, seed=3)
    with closing(BatchLoader(packing, 16, 8, depth=2)) as loader:
        for first in (16, 24, 32):
            assert np.array_equal(loader.next().tokens, packing.batch(first, 8).tokens)
    assert loader.stall_s > 0
    assert not any(thread.name.startswith("batch-loader") for thread in threading.enumerate())


def test_held_out_documents_are_not_trained_on(dataset: TokenDataset) -> None:
    train, held_out = split_documents(dataset, seed=0)
    assert len(held_out) == 1
    assert sorted([*train, *held_out]) == list(range(dataset.documents))


def test_too_little_data_is_refused(dataset: TokenDataset) -> None:
    with pytest.raises(TrainingError, match=r"too few for one sequence of 100000"):
        Packing(dataset, 100000, seed=0)


# -- tokenizers and conversations ------------------------------------------------------------------------------


def test_a_trained_tokenizer_is_the_same_for_us_and_for_transformers(tmp_path: Path) -> None:
    backend = bpe_tokenizer(TEXTS, 400)
    assert backend.get_vocab_size() <= 400
    assert backend.to_str() == bpe_tokenizer(TEXTS, 400).to_str()
    save_tokenizer(backend, tmp_path, chat=True)
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    text = "Document 7: grüße 🌍\n\tnew <|im_start|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special=False) == text
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_only_answers_are_learnt_from_conversations(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer", chat=True)
    source = tmp_path / "chats.jsonl"
    messages = [
        {"role": "user", "content": "question"}, {"role": "assistant", "content": "réponse"},
        {"role": "user", "content": "more"}, {"role": "assistant", "content": "less"},
    ]  # fmt: skip
    source.write_text(json.dumps({"messages": messages}) + "\n", "utf-8")
    dataset = TokenDataset(
        build_dataset(tmp_path / "set", [str(source)], tmp_path / "tokenizer", chat=True, workers=1)
    )
    assert dataset.loss_mask is not None
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    learnt = tokenizer.decode(dataset.tokens[dataset.loss_mask == 1].tolist(), skip_special=False)
    assert learnt == "réponse<|im_end|>\nless<|im_end|>\n"
    batch = Packing(dataset, len(dataset.tokens) - 1, seed=0).batch(0, 1)
    wanted = batch.targets[batch.targets != IGNORED]
    assert tokenizer.decode(wanted.tolist(), skip_special=False) == learnt


QUESTION = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": QUESTION},
        {"prompt": "Who?", "completion": "Me."},
        {"prompt": QUESTION[:1], "completion": QUESTION[1:]},
        {"instruction": "Who?", "output": "Me."},
        {"instruction": "Who?", "input": "", "output": "Me."},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    ],
)
def test_chat_data_of_every_usual_form_is_read(row: dict[str, object]) -> None:
    assert as_messages(row) == QUESTION


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("text", "a conversation is a JSON object, got str"),
        ({"question": "a", "answer": "b"}, "the fields here are question, answer"),
        ({"messages": QUESTION[:1]}, "no answer of an assistant"),
        ({"messages": "Who?"}, "messages must be a list of messages"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 1 of messages needs a role and a content",
        ),
        ({"instruction": 5, "output": "a"}, "instruction must be text, got int"),
    ],
)
def test_a_wrong_conversation_is_named_with_its_line(
    tmp_path: Path, tokenizer: Path, row: object, told: str
) -> None:
    source = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": QUESTION})
    source.write_text(f"{good}\n\n{good}\n{json.dumps(row)}\n")
    with pytest.raises(TrainingError, match=rf"chats.jsonl, line 4: .*{told}"):
        build_dataset(tmp_path / "set", [str(source)], tokenizer, chat=True, workers=1)


def test_a_long_text_is_cut_so_that_a_part_can_be_held_out() -> None:
    assert cut_long(np.array([300, 200])).tolist() == [300, 200]
    pieces = cut_long(np.array([100_000, 10, 0]))
    assert pieces.sum() == 100_010 and len(pieces) == 21 and pieces.min() == 10

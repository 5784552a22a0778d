"""`cumulo chat` samples as the API does."""

from pathlib import Path

import pytest

from cumulo.cli import chat as conversation
from cumulo.cli.shared.options import EngineOptions
from tests.serve.tiny_model import save_tiny_model


def test_a_conversation_samples_as_the_models_authors_recommend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 7}')
    typed = [
        "/set",
        "/set top_k 3",
        "/set seed 7",
        "/set",
        "/set seed random",
        "/set top_p",
        "/set min_p none",
    ]
    monkeypatch.setattr(conversation, "typed_messages", lambda: iter(typed))
    chosen = conversation.ChatOptions(model=str(model), engine=EngineOptions(kv_memory_gib=0.01))
    conversation.talk(chosen, {"top_p": 0.5, "max_tokens": 4})
    told = capsys.readouterr().err.replace("\n", " ")
    assert "temperature 0.6 · top_k 7 · top_p 0.5" in told and "temperature 0.6 · top_k 3 · top_p 0.5" in told
    assert "repetition_penalty 1 · max_tokens 4 · seed random" in told, "numbers as people write them"
    assert "seed is now 7" in told and "max_tokens 4 · seed 7" in told and "seed is now random" in told
    assert "top_p is 0.5" in told and "/set min_p takes a number, got 'none'" in told


def test_a_long_conversation_leaves_out_its_oldest_turns_and_says_which_limit_ended_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path)
    question = "the cat sat on the mat and the dog saw that the cat was there"
    typed = [question] * 6 + [
        "/set max_tokens 400",
        question,
        "/why",
        question,
        "/summarize",
        question,
        "/clear",
    ]
    monkeypatch.setattr(conversation, "typed_messages", lambda: iter(typed))
    chosen = conversation.ChatOptions(
        model=str(model), engine=EngineOptions(kv_memory_gib=0.01, max_context=256)
    )
    conversation.talk(chosen, {"temperature": 0.0, "max_tokens": 30})
    told = capsys.readouterr()
    assert "error" not in told.err and "shorten the prompt" not in told.err
    assert "turns are left out: the context holds 256 tokens; /summarize" in told.err
    assert "30 tokens" in told.err and "stopped at max_tokens · context" in told.err
    assert "the context is full · context 256 of 256" in told.err and "the context is full" in told.out
    assert "long answers of earlier turns are shortened: the context holds" in told.err
    assert "replaced by this summary, which was cut at" in told.err

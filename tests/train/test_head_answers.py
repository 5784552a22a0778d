"""What a head is trained on: conversations of many kinds, and the model's own answers to them."""

import re

import numpy as np
import pytest
import torch

from cumulo.bench.speculate import chat_prompts, editing_prompts
from cumulo.engine.decide.params import SamplingParams
from cumulo.errors import ConfigError
from cumulo.train.head import writer as module
from cumulo.train.head.answers import answered, conversations, own_questions
from cumulo.train.head.config import HeadConfig
from cumulo.train.head.prompts import AskedTurns, Grammar
from cumulo.train.head.writer import Draw, Writer
from tests.engine.equivalence import run_alone
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine

DECODER = make_decoder("dense")
GREEDY = Draw()


def quiet(*_):
    pass


def engine_of(**options):
    return make_engine(DECODER, **{"blocks": 64, **options})


def prompts_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in range(count)]


def words_of(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def test_conversations_are_different_and_the_same_for_a_seed():
    found = Grammar(3).conversations(1500)
    assert len(set(found)) == len(found) == 1500
    assert found == Grammar(3).conversations(1500) != Grammar(4).conversations(1500)
    assert any(len(one.turns) > 1 for one in found) and any(one.system for one in found)
    assert not any(
        "{" in turn and "}" in turn and "int main" not in turn for one in found for turn in one.turns
    )


def test_what_the_benchmark_asks_is_not_trained_on():
    asked = {" ".join(words_of(text)) for text in (*chat_prompts(400), *editing_prompts(50))}
    trained = {" ".join(words_of(turn)) for one in Grammar(0).conversations(10_000) for turn in one.turns}
    assert not asked & trained


def test_a_writer_writes_what_an_engine_answers(monkeypatch):
    """In batches of different lengths, some of which lose rows that have ended."""
    monkeypatch.setattr(module, "_MOST_ROWS", 3)
    monkeypatch.setattr(module, "_PROMPT_PLACES", 16)
    monkeypatch.setattr(module, "_LOOK_EVERY", 3)
    prompts, ends = prompts_of(7), (7, 11)
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    told = []
    written = Writer(DECODER, ends).write(prompts, 14, [GREEDY] * 7, told.append)
    shorter = 0
    for prompt, found in zip(prompts, written, strict=True):
        expected = list(run_alone(engine_of, prompt, greedy).samples[0].token_ids)
        end = next((place for place, token in enumerate(expected) if token in ends), len(expected))
        assert found == expected[: end + 1]
        shorter += len(found) < 14
    assert told == [3, 6, 7] and shorter > 0


def test_a_writer_draws_from_the_models_probabilities():
    prompt, count = prompts_of(1)[0], 3000
    drawn = Writer(DECODER, (), seed=5).write([prompt] * count, 1, [Draw(0.9, 0.7)] * count, quiet)
    found = np.bincount([one[0] for one in drawn], minlength=VOCAB)
    hidden = Writer(DECODER, ())
    tokens = torch.tensor([prompt])
    caches = [tuple(torch.zeros(1, s.kv_heads, len(prompt), s.head_dim, dtype=torch.float64) for _ in "kv")
              for s in [DECODER.spec] * DECODER.spec.layers]  # fmt: skip
    logits = DECODER.logits(hidden._begin(tokens, torch.tensor([len(prompt)]), caches))[0]
    chances = np.sort((logits / 0.9).softmax(-1).numpy())[::-1]
    order = np.argsort(-logits.numpy())
    kept = order[: int((np.cumsum(chances) - chances < 0.7).sum())]
    assert set(np.flatnonzero(found)) <= set(kept.tolist())
    expected = chances[: len(kept)] / chances[: len(kept)].sum() * count
    assert ((found[kept] - expected) ** 2 / expected).sum() < 3 * len(kept) + 10


class Letters:
    """A tokenizer of letters with a template of its own."""

    def render_chat(self, messages):
        text = "".join(f"<{one['role'][0]}>{one['content']}" for one in messages) + "<a>"
        return text, [ord(letter) % VOCAB for letter in text]

    def apply_chat_template(self, messages):
        return self.render_chat(messages)[0]

    def encode(self, text):
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


class Scripted:
    """A writer that says what it is told to, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.draws = list(answers), [], []

    def write(self, prompts, most, draws, tell):
        self.asked.append([list(one) for one in prompts])
        self.draws.append(list(draws))
        return [self.answers[index % len(self.answers)] for index in range(len(prompts))]


def test_a_second_turn_is_answered_behind_the_first_answer():
    class Sentences(Letters):
        def decode(self, ids):
            return "One. Two! And the be"

    writer, tokenizer = Scripted([5, 6, 7]), Sentences()
    asked = [AskedTurns(("a?",)), AskedTurns(("b?", "why?"), "S")]
    answers = answered(HeadConfig(), tokenizer, writer, asked, quiet)
    first = tokenizer.encode("<s>S<u>b?<a>")
    second = tokenizer.encode("<s>S<u>b?<a>One. Two!<u>why?<a>")
    assert writer.asked == [[first], [tokenizer.encode("<u>a?<a>"), second]]
    assert answers[1].tokens.tolist() == [*second, 5, 6, 7] and answers[1].prompt_length == len(second)
    answered(HeadConfig(), tokenizer, writer, [AskedTurns((f"{n}",)) for n in range(16)], quiet)
    assert [draw.temperature > 0 for draw in writer.draws[-1]] == ([False] * 7 + [True]) * 2


def test_own_questions_are_whole_lines_and_differ():
    class Lines(Letters):
        def decode(self, ids):
            return {1: "What is a word?\nAnd", 2: "two words", 3: "never ends its own line"}[ids[0]]

    writer = Scripted([1], [1], [2], [3] * 64)
    assert own_questions(Lines(), writer, 4, quiet) == ["What is a word?"]
    assert writer.asked[0][0] == Lines().encode("<u>")


def test_half_of_the_conversations_are_the_models_own_if_wanted(tmp_path):
    own = [f"own question {n}?" for n in range(10)]
    found = conversations(HeadConfig(prompts="own", answers=20), lambda count: own[:count])
    assert sum(one.turns[0].startswith("own") for one in found) == 10 and len(found) == 20
    path = tmp_path / "lines.txt"
    path.write_text("first\n\nsecond\n")
    asked = conversations(HeadConfig(prompts=str(path), answers=5), quiet)
    assert sorted({one.turns[0] for one in asked}) == ["first", "second"] and len(asked) == 5
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        conversations(HeadConfig(prompts=str(path)), quiet)

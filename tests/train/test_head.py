"""A head learns to foresee a model's own answers, and drafts in an engine as it did in training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.draft_source import DraftSource, attach_draft
from cumulo.errors import ModelError
from cumulo.models.batch import KVCache
from cumulo.models.heads.eagle import StreamTap, eagle_layers
from cumulo.models.heads.files import is_eagle_folder, load_eagle, save_eagle
from cumulo.train.head import examples as examples_module
from cumulo.train.head.answers import OwnAnswer
from cumulo.train.head.config import HeadConfig, read_head_config
from cumulo.train.head.examples import batches, examples_of, together, with_states
from cumulo.train.head.trainer import HeadTrainer, _losses, new_head
from cumulo.train.head.writer import hidden_states
from tests.engine.equivalence import FreeDrafts, run_alone
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine, run
from tests.models.sequences import one_sequence

DECODER = make_decoder("dense")
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def engine_of(**options):
    return make_engine(DECODER, **{"blocks": 64, **options})


@pytest.fixture(scope="module")
def answers():
    rng = np.random.default_rng(0)
    made = []
    for _ in range(8):
        prompt = rng.integers(0, VOCAB, 6).tolist()
        tokens = prompt + run_alone(engine_of, prompt, GREEDY).samples[0].token_ids
        array = np.array(tokens, dtype=np.int32)
        made.append(OwnAnswer(array, 6))
    return made


@pytest.fixture(scope="module")
def trained(answers, tmp_path_factory):
    config = HeadConfig(steps=70, batch_tokens=150, draft_vocabulary=VOCAB, learning_rate=3e-3, device="cpu")
    trainer = HeadTrainer(config, lambda *_: None)
    head = new_head(config, DECODER, answers)
    examples = examples_of(answers, config.unroll, "cpu")
    before = trainer.accuracy(head, DECODER, examples, 2)
    trainer._train(head, DECODER, examples)
    folder = tmp_path_factory.mktemp("head")
    save_eagle(folder, head)
    return trainer, head, examples, before, folder


def test_states_for_training_are_those_that_a_step_sees(answers):
    """Computed text by text, filled up at their ends; a step's are tapped."""
    spec = DECODER.spec
    tokens = [torch.from_numpy(answers[0].tokens.astype(np.int64)), torch.arange(9)]
    stream, last = hidden_states(DECODER, torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True))
    for row, one in enumerate(tokens):
        cache = KVCache(spec, 1, len(one), torch.float64)
        tap = DECODER.tap = StreamTap(eagle_layers(spec.layers), len(one), spec.hidden, torch.float64, "cpu")
        ended = DECODER.forward(one_sequence(one, torch.arange(len(one))), cache)
        DECODER.tap = None
        assert torch.allclose(tap.kept, stream[row, : len(one)], atol=1e-9)
        assert torch.allclose(ended, last[row, len(one) - 1], atol=1e-9)


@pytest.mark.long
def test_training_makes_proposals_right(trained):
    trainer, head, examples, before, _ = trained
    after = trainer.accuracy(head, DECODER, examples, 2)
    assert after[0] > before[0] + 0.3


def test_an_engine_proposes_what_training_says(trained, answers):
    """Place by place, behind the model's hidden states and behind the head's own output."""
    trainer, head, examples, _, folder = trained
    served = load_eagle(folder, DECODER.spec, dtype=torch.float64, pack=False)
    engine = make_engine(DECODER, blocks=64, speculate="model")
    engine.scheduler.speculation.cost = FreeDrafts()
    engine.scheduler.speculation.fixed_count = 2
    attach_draft(DraftSource("head", DECODER.spec, served), engine.runner, DECODER)
    answer = answers[0]
    seen = []
    engine.runner.drafter.propose = _spy(engine.runner.drafter.propose, engine.runner.table, seen)
    engine.add(answer.tokens[:6].tolist(), GREEDY, request_id="r")
    output = run(engine)["r"]
    DECODER.tap = None
    assert output.samples[0].token_ids == answer.tokens[6:].tolist()
    assert output.story.accepted_tokens > 0
    with torch.no_grad():
        example = examples[0]
        logits = [
            head.token_of[step.argmax(-1)].tolist() for step in _unrolled_logits(trainer, head, example)
        ]
    compared = 0
    for length, proposed in seen:  # `length` tokens were known: the last place is length - 2
        place = length - 2
        if place - example.first < 0 or place >= example.length - 2 or len(proposed) < 2:
            continue
        assert proposed[0] == logits[0][place - example.first]
        if proposed[0] == answer.tokens[length]:  # training goes on behind the right token only
            assert proposed[1] == logits[1][place - example.first]
            compared += 1
    assert compared >= 3


def _spy(propose, table, seen):
    def wrapped(wanted, *rest):
        lengths = {draw: int(table.lengths[slot]) for draw, slot, _ in wanted}
        found = propose(wanted, *rest)
        seen.extend((lengths[draw], tokens) for draw, tokens in found[0].items())
        return found

    return wrapped


def _unrolled_logits(trainer, head, example):
    batch = together(DECODER, [example], trainer.config.unroll)
    return [head.logits(stream) for stream in trainer.unrolled(head, DECODER, batch)]


def test_what_is_taught_at_a_place_is_what_the_model_expects_behind_it(answers):
    """The first proposal at place p is token p + 2, of which the state at p + 1 speaks; the next one's follows."""
    examples = examples_of(answers[:3], 2, "cpu")
    batch = together(DECODER, examples, 2)
    _, last = hidden_states(DECODER, batch.tokens)
    for ahead in range(2):
        expected = last[batch.rows, batch.places + 1 + ahead]
        assert torch.allclose(batch.teacher[batch.taught + ahead], expected, atol=1e-9)
        likeliest = DECODER.logits(expected).argmax(-1)  # the answers are greedy
        assert torch.equal(likeliest, batch.tokens[batch.rows, batch.places + 2 + ahead])


def test_kept_states_are_those_that_a_batch_would_compute(answers, monkeypatch):
    """As many as there is memory for; the others are computed with their batch."""
    examples = examples_of(answers, 2, "cpu")
    spec = DECODER.spec
    bytes_each = examples[0].length * 4 * spec.hidden * 8
    monkeypatch.setattr(examples_module, "_AT_ONCE", 2 * examples[0].length)
    monkeypatch.setattr(examples_module, "_SHARE_OF_MEMORY", 1.0)
    monkeypatch.setattr(examples_module, "available_memory", lambda: 5 * bytes_each)
    kept = with_states(examples, DECODER)
    assert sum(one.kept is not None for one in kept) == 4  # two at a time
    for before, after in zip(examples, kept, strict=True):
        if after.kept is not None:
            computed, found = together(DECODER, [before], 2), together(DECODER, [after], 2)
            assert torch.allclose(computed.stream, found.stream, atol=1e-9)
            assert torch.allclose(computed.teacher, found.teacher, atol=1e-9)


def test_every_answer_is_in_one_batch_of_a_round(answers):
    examples = examples_of(answers, 2, "cpu")
    source = batches(examples, 70, seed=1)
    seen = []
    while len(seen) < len(examples):
        batch = next(source)
        assert len(batch) == 1 or max(one.length for one in batch) * len(batch) <= 70
        seen += [id(one) for one in batch]
    assert sorted(seen) == sorted(id(one) for one in examples)


def test_the_share_of_right_proposals_is_counted_place_by_place(trained):
    trainer, head, examples, _, _ = trained
    shares = trainer.accuracy(head, DECODER, examples, 2)
    first = []
    for example in examples:
        logits = _unrolled_logits(trainer, head, example)[0]
        batch = together(DECODER, [example], 2)
        wanted = batch.tokens[batch.rows, batch.places + 2]
        first += (head.token_of[logits.argmax(-1)] == wanted).tolist()
    assert shares[0] == pytest.approx(np.mean(first)) and shares[0] >= shares[1]


@pytest.mark.parametrize("settings", [{"ffn_hidden": 96}, {"minutes": 0.002}])
def test_a_wider_head_and_a_time_limit_train_too(answers, settings):
    config = HeadConfig(steps=12, batch_tokens=150, draft_vocabulary=VOCAB, device="cpu", **settings)
    trainer = HeadTrainer(config, lambda *_: None)
    head = new_head(config, DECODER, answers)
    before = {name: one.clone() for name, one in head.named_parameters()}
    examples = examples_of(answers, config.unroll, "cpu")
    first = float(trainer.loss(head, DECODER, together(DECODER, examples, config.unroll)))
    steps, _ = trainer._train(head, DECODER, examples)
    assert steps == 12 or config.minutes is not None
    assert float(trainer.loss(head, DECODER, together(DECODER, examples, config.unroll))) < first
    assert all(not torch.equal(one, before[name]) for name, one in head.named_parameters())
    assert head.spec.ffn_hidden == settings.get("ffn_hidden", DECODER.spec.ffn_hidden)


def test_a_wider_head_begins_as_the_usual_one(answers):
    usual, wide = (
        new_head(HeadConfig(draft_vocabulary=VOCAB, ffn_hidden=width), DECODER, answers)
        for width in (None, 96)
    )
    x = torch.randn(3, DECODER.spec.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(usual.ffn(x), wide.ffn(x), atol=1e-12)


def test_a_head_comes_back_from_its_folder_as_it_was(trained):
    _, head, _, _, folder = trained
    assert is_eagle_folder(folder)
    again = load_eagle(folder, DECODER.spec, dtype=torch.float64, pack=False)
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert torch.equal(head.token_of, again.token_of)


def test_a_head_of_another_model_is_refused_by_name(trained):
    with pytest.raises(ModelError, match="hidden size 32 and 61 tokens, but the served one has 64"):
        load_eagle(trained[-1], replace(DECODER.spec, hidden=64))


def test_the_example_is_a_heads_configuration():
    found = read_head_config(Path(__file__).parents[2] / "examples" / "draft-head.yaml", {})
    assert found is not None and found.learning_rate == 1e-3


def test_a_file_of_kind_eagle_is_a_heads_configuration(tmp_path):
    path = tmp_path / "head.yaml"
    path.write_text("kind: eagle\nsteps: 3\n")
    assert read_head_config(path, {"answers": "5"}) == HeadConfig(steps=3, answers=5)
    path.write_text("steps: 3\n")
    assert read_head_config(path, {}) is None


def test_the_loss_is_cross_entropy_with_the_likeliest_token_counted_twice():
    rng = torch.Generator().manual_seed(0)
    logits, taught = (torch.randn(5, 9, generator=rng, dtype=torch.float64) for _ in range(2))
    wanted = 0.5 * taught.softmax(-1) + 0.5 * torch.nn.functional.one_hot(taught.argmax(-1), 9)
    expected = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    assert torch.allclose(_losses(logits, taught), expected, atol=1e-12)

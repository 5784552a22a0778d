"""Speculation's promise: drafts change how fast tokens come, never which ones."""

import math
import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.speculation.choose import Acceptance, Offer, choose, class_of_chance, worth_asking
from cumulo.engine.decide.speculation.drafts import NgramDraft, ProposedDraft
from cumulo.engine.decide.speculation.policy import Drafting
from cumulo.engine.play.draft_source import DraftSource, attach_draft
from tests import thorough
from tests.engine.equivalence import FreeDrafts, Lengths, Way, check, draw_requests, run_alone
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine, run

DECODERS = {name: make_decoder(name) for name in ("dense", "window", "latent")}
COPY = [3, 4, 5, 6, 8, 9, 10, 11]  # what a prompt says again and again


def speculating(name: str, **options):
    engine = make_engine(DECODERS[name], **{"blocks": 64, **options}, speculate="ngram")
    engine.scheduler.speculation.cost = FreeDrafts()
    return engine


def with_drafter(engine, source: DraftSource):
    attach_draft(source, engine.runner, engine.runner.model)
    return engine


def drafting_model(name: str, draft: str, **options):
    """An engine whose drafts come from another model of the same vocabulary."""
    engine = make_engine(DECODERS[name], **{"blocks": 64, **options}, speculate="model")
    engine.scheduler.speculation.cost = FreeDrafts()
    return with_drafter(engine, DraftSource(draft, DECODERS[name].spec, DECODERS[draft]))


def copying(**more) -> SamplingParams:
    """Answers that mostly say the prompt's tokens again: the model is random, a bias makes it repeat itself."""
    bias = dict.fromkeys(COPY, 6.0)
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logit_bias": bias, **more}
    )


@pytest.mark.long
@pytest.mark.parametrize("name", list(DECODERS))
@settings(max_examples=thorough.examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    budget=st.sampled_from([9, 64]),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    tier_blocks=st.sampled_from([0, 60]),
    count=st.integers(1, 6),
)
def test_tokens_and_log_probabilities_are_those_of_a_run_without_drafts(
    name, seed, block_size, spare_blocks, budget, prefix_cache, overlap, tier_blocks, count
):
    rng = random.Random(seed)
    requests = draw_requests(rng, count, rng.choice([4, VOCAB]), Lengths(answer=40))
    way = Way(block_size, spare_blocks, budget, prefix_cache, overlap, tier_blocks, speculate="ngram")
    check(
        lambda **options: make_engine(DECODERS[name], **{"blocks": 64, **options}), rng, requests, way, 1e-9
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_really_accepted_and_save_steps(overlap):
    """Guards the property test above: drafts are made, some are right and some are not."""
    prompt = COPY * 3
    expected = run_alone(lambda **o: make_engine(DECODERS["dense"], **{"blocks": 64, **o}), prompt, copying())
    engine = speculating("dense", overlap=overlap)
    engine.add(prompt, copying(), request_id="r")
    steps = []
    story = (output := run(engine, steps.append)["r"]).story
    engine.runner.close()
    assert output.samples[0].token_ids == expected.samples[0].token_ids
    assert 0 < story.accepted_tokens < story.drafted_tokens
    assert story.accepted_tokens >= 10 and len(steps) < 2 * 40
    words = story.describe()
    assert f"{story.accepted_tokens} of {story.drafted_tokens} drafted tokens were accepted" in words


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(overlap):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = run_alone(lambda **o: make_engine(DECODERS["dense"], **{"blocks": 64, **o}), COPY * 5, greedy)
    engine = drafting_model("dense", "dense", overlap=overlap, block_size=4, max_tokens_per_step=16)
    for index in range(3):
        engine.add(COPY * 5, greedy, request_id=f"r{index}")
    outputs = run(engine)
    engine.runner.close()
    for output in outputs.values():
        assert output.samples[0].token_ids == expected.samples[0].token_ids
        assert output.story.accepted_tokens == output.story.drafted_tokens > 20


def test_following_a_prompt_is_not_taken_for_what_a_proposal_costs():
    engine = drafting_model("dense", "dense", overlap=False)
    speculation = engine.scheduler.speculation
    observe, known = speculation.observe, []

    def observe_slow_prompts(plan, timing, now_s):
        begins = any(start == 0 for start in plan.starts)
        before = speculation.proposal_s
        slow_s = timing.proposed * (5.0 if begins else 0.001)
        observe(plan, timing._replace(proposing_s=slow_s), now_s)
        if begins:
            known.append((before, speculation.proposal_s))

    speculation.observe = observe_slow_prompts
    for _ in range(3):
        engine.add(COPY * 5, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        run(engine)
    engine.runner.close()
    assert [after for _, after in known] == [5.0, *(before for before, _ in known[1:])]
    assert all(before < 0.1 for before, _ in known[1:])


@pytest.mark.long
@settings(max_examples=thorough.examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    draft=st.sampled_from(list(DECODERS)),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    overlap=st.booleans(),
    tier_blocks=st.sampled_from([0, 60]),
    count=st.integers(1, 5),
)
def test_drafts_of_any_model_change_no_token(
    seed, draft, block_size, spare_blocks, overlap, tier_blocks, count
):
    rng = random.Random(seed)
    requests = draw_requests(rng, count, VOCAB, Lengths())

    def make(**options):
        if options.pop("speculate", ""):
            return drafting_model("dense", draft, **options)
        return make_engine(DECODERS["dense"], **{"blocks": 64, **options})

    check(
        make,
        rng,
        requests,
        Way(block_size, spare_blocks, 64, True, overlap, tier_blocks, speculate=True),
        1e-9,
    )


def test_a_stop_token_among_accepted_tokens_ends_the_answer_there():
    alone = run_alone(lambda **o: make_engine(DECODERS["dense"], **{"blocks": 64, **o}), COPY * 3, copying())
    tokens = alone.samples[0].token_ids
    ended = set()
    for stop in set(tokens):
        engine = speculating("dense")
        engine.add(COPY * 3, copying(stop_token_ids=(stop,), logprobs=1), request_id="r")
        sample = run(engine)["r"].samples[0]
        assert sample.token_ids == tokens[: tokens.index(stop) + 1]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert [entry.token for entry in sample.logprobs] == sample.token_ids
        ended.add(len(sample.token_ids))
    assert len(ended) > 3


def test_streamed_pieces_carry_all_tokens_once():
    engine = speculating("dense")
    engine.add(COPY * 3, copying(logprobs=0), request_id="r", stream=True)
    pieces, finished = [], None
    while engine.has_work:
        output = engine.step()
        pieces += output.deltas
        finished = output.finished[0] if output.finished else finished
    assert [token for piece in pieces for token in piece.token_ids] == finished.samples[0].token_ids
    assert [entry.token for piece in pieces for entry in piece.logprobs] == finished.samples[0].token_ids
    assert max(len(piece.token_ids) for piece in pieces) > 1


def test_an_abort_while_drafts_are_verified_leaves_nothing_inconsistent():
    engine = speculating("dense", overlap=True, block_size=1)
    for index in range(3):
        engine.add(COPY * 3, copying(), request_id=f"r{index}")

    def between(step: int) -> None:
        if step == 12:
            engine.abort("r1")

    outputs = run(engine, between)
    engine.runner.close()
    assert outputs["r1"].samples[0].finish_reason == "abort"
    assert outputs["r0"].samples[0].token_ids == outputs["r2"].samples[0].token_ids


def test_sampled_tokens_keep_their_distribution():
    """Chi-square of the first three tokens against their exact probabilities, drafts included."""
    words, draws = [3, 4, 5], 500
    bias = {token: -100.0 for token in range(VOCAB) if token not in words}
    asked = dict(temperature=1.5, ignore_eos=True, logit_bias=bias)
    prompt = [3, 4, 5, 3, 5, 4, 3, 3, 4, 4, 5, 5]

    def next_words(past: tuple[int, ...]) -> dict[int, float]:
        params = SamplingParams(**asked, max_tokens=1, logprobs=len(words))
        output = run_alone(
            lambda **o: make_engine(DECODERS["dense"], blocks=64, **o), [*prompt, *past], params
        )
        weights = {token: math.exp(value / 1.5) for token, value in output.samples[0].logprobs[0].top}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    exact = {(): 1.0}
    for _ in range(3):
        exact = {(*past, word): p * q for past, p in exact.items() for word, q in next_words(past).items()}
    engine = speculating("dense", max_running=300, max_tokens_per_step=2048, blocks=512)
    engine.add(prompt, SamplingParams(**asked, max_tokens=4, n=100, seed=0), request_id="r0")
    for seed in range(1, draws // 100):
        engine.add(prompt, SamplingParams(**asked, max_tokens=4, n=100, seed=seed), request_id=f"r{seed}")
    outputs = run(engine).values()
    assert sum(output.story.accepted_tokens for output in outputs) > draws // 10
    drawn = Counter(tuple(sample.token_ids[:3]) for output in outputs for sample in output.samples)
    likely = [triple for triple, p in exact.items() if draws * p >= 5]
    rest = draws - sum(draws * exact[triple] for triple in likely)
    cells = [(drawn[triple], draws * exact[triple]) for triple in likely]
    cells.append((draws - sum(count for count, _ in cells), rest))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells if expected > 1e-6)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile that chance exceeds once in a thousand times.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# -- the parts ------------------------------------------------------------------------------------------------
def test_an_n_gram_draft_continues_the_longest_common_past():
    draft, text = NgramDraft(), [1, 2, 3, 9, 2, 3, 7, 1, 2, 3]
    draft.advance(text, len(text))
    assert draft.next_tokens(text, 4) == [
        9,
        2,
        3,
        7,
    ]  # after 1 2 3, though 2 3 was followed by 7 more recently
    assert draft.matched == 3
    text += [9, 2]
    assert draft.advance(text, len(text)) == (2, 0)
    assert draft.next_tokens(text, 2) == [3, 7]
    text.append(5)
    assert draft.advance(text, len(text)) == (0, 1)
    assert not draft.expects


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end():
    draft, text = NgramDraft(), [8, 1, 2, 3, 1, 2, 3, 1, 2]
    draft.advance(text, len(text))
    assert draft.next_tokens(text, 7) == [3, 1, 2, 3, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(
    offers=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=3),
    rows=st.integers(1, 4),
    token_s=st.floats(0.001, 1.0),
)
def test_the_drafts_chosen_are_those_of_the_highest_rate(offers, rows, token_s):
    rows += len(offers)
    given_offers = [Offer(*offer) for offer in offers]

    def rate(counts) -> float:
        gained = sum(
            min(o.rate, 0.98) ** j for o, k in zip(given_offers, counts, strict=True) for j in range(1, k + 1)
        )
        return (rows + gained) / (1.0 + token_s * (rows + sum(counts)))

    best = max(rate(counts) for counts in product(*(range(offer.length + 1) for offer in given_offers)))
    chosen = choose(given_offers, rows, rows, 1.0, token_s, 100)
    assert rate(chosen.counts) == pytest.approx(best)
    assert chosen.gain == pytest.approx(best / rate([0] * len(offers)))


def test_drafting_falls_to_zero_when_the_batch_is_full():
    """Where every token costs as much as a row, a draft that may be wrong only loses."""
    offers = [Offer(8, 0.7)] * 64
    assert sum(choose(offers, 64, 64, 0.001, 0.001, 512).counts) == 0
    assert sum(choose(offers[:1], 1, 1, 0.010, 0.001, 512).counts) >= 3


def test_drafts_are_verified_as_far_as_their_drafter_is_sure():
    """Four tokens cost as much as a step; the third is doubtful, so the fourth is not worth its time either."""
    offer = Offer(4, 0.9, (0.9, 0.9, 0.3, 0.9))
    assert choose([offer], 1, 1, 0.75, 0.25, 16).counts == [2]


def test_a_drafter_is_asked_where_what_it_is_sure_of_pays_for_asking():
    step = (0.6, 0.4)
    sure_half = worth_asking([0.5, 0.0, 0.0, 0.5], [[0.2, 0.5, 0.7, 0.9]], *step, 0.05)
    # Half of the time nothing is verified: 1 + 0.5 x 0.9 tokens in 1 + 0.05 + 0.5 x 0.4 of the time.
    assert sure_half.gain == pytest.approx(1.45 / 1.25) and sure_half.row[0] > 0
    assert worth_asking([1.0, 0.0, 0.0, 0.0], [[0.2, 0.5, 0.7, 0.9]], *step, 0.05).row[0] < 0
    assert worth_asking([0.5, 0.0, 0.0, 0.5], [[0.2, 0.5, 0.7, 0.9]], *step, 0.5).row[0] < 0
    full = worth_asking([0.5, 0.0, 0.0, 0.5], [[0.2, 0.5, 0.7, 0.9]] * 64, 0.0, 0.4, 0.05)
    assert max(full.row) < 0 and full.gain < 1


def test_how_sure_a_drafter_is_says_how_often_it_is_right():
    draft, everybody = ProposedDraft(), Acceptance(by_chance=True)
    drafting = Drafting(everybody, draft)
    sequence = SimpleNamespace(tokens=[1, 2], prompt_length=2)
    drafting.follow(sequence)
    for _ in range(60):
        draft.propose([7, 8], [0.95, 0.4])
        assert drafting.offer.length == 2
        sequence.tokens += [7, 9]  # the sure one came, the doubtful one did not
        drafting.follow(sequence)
    sure, doubtful = class_of_chance(0.95), class_of_chance(0.4)
    assert drafting.acceptance.rate(sure) > 0.9 and drafting.acceptance.rate(doubtful) < 0.1


def row_s(cost: StepCost, drafts: int = 0) -> float:
    """The time of a step of one row and its drafts."""
    return cost.decode_s(1, 0) + drafts * cost.draft_s(1, 0)


def test_the_cost_of_a_step_is_learnt_from_few_sizes():
    cost = StepCost()
    for _ in range(20):
        cost.observe(StepMix(0, 0, 512), 512 * 0.003)
    for _ in range(5):
        cost.observe(StepMix(1), 0.010)
    assert row_s(cost) == pytest.approx(0.010, rel=0.1)
    assert cost.draft_s(1, 0) == pytest.approx(0.003, rel=0.2)
    for _ in range(10):
        cost.observe(StepMix(1, 0, 7, 28, drafts=7), 0.024)
    assert row_s(cost) == pytest.approx(0.010, rel=0.2) and row_s(cost, 7) == pytest.approx(0.024, rel=0.1)


def test_one_step_that_was_held_up_does_not_end_drafting():
    cost = StepCost()
    for _ in range(20):
        cost.observe(StepMix(0, 0, 100), 0.7)
        cost.observe(StepMix(1), 0.015)
    cost.observe(StepMix(1, 0, 1, 1, drafts=1), 0.2)  # ten times as long as it should have taken
    for _ in range(15):
        cost.observe(StepMix(1), 0.015)
    draft_s = cost.draft_s(1, 0)
    assert choose([Offer(8, 0.9)], 1, 1, row_s(cost) - draft_s, draft_s, 8).counts[0] >= 1


def test_a_short_prompt_says_little_about_what_a_draft_costs():
    """A token of a prompt takes 4.7 ms here, a draft 6: what steps with drafts took decides."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(StepMix(0, 0, 38, 741), 0.190)
    for _ in range(10):
        cost.observe(StepMix(1), 0.0113)
    assert cost.draft_s(1, 0) == pytest.approx(0.005, rel=0.2)  # nothing else is known
    for _ in range(6):
        cost.observe(StepMix(1, 0, 1, 1, drafts=1), 0.0172)
        cost.observe(StepMix(1), 0.0113)
    cost.observe(StepMix(0, 0, 40, 820), 0.195)
    assert cost.draft_s(1, 0) == pytest.approx(0.0059, rel=0.05)
    for _ in range(200):  # long after the last draft, too
        cost.observe(StepMix(1), 0.0113)
    assert cost.draft_s(1, 0) == pytest.approx(0.0059, rel=0.1)

"""The engine's first promise: what else runs, and how the work is cut, shared, moved or overlapped, never
changes a request's tokens. Exact, on real models in float64."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import SamplingParams
from tests import thorough
from tests.engine.equivalence import Lengths, Way, check, draw_requests, run_alone
from tests.engine.tiny_engine import SPECS, VOCAB, make_decoder, make_engine, run

DECODERS = {name: make_decoder(name) for name in SPECS}


def maker(name: str):
    return lambda **options: make_engine(DECODERS[name], **{"blocks": 64, **options})


def alone(name: str, prompt, params):
    return run_alone(maker(name), prompt, params)


@pytest.mark.long
@pytest.mark.parametrize("name", list(SPECS))
@settings(max_examples=thorough.examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    budget=st.sampled_from([5, 9, 64]),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    count=st.integers(1, 7),
    tier_blocks=st.sampled_from([0, 0, 2, 60]),
)
def test_tokens_do_not_depend_on_what_happens_around_them(
    name, seed, block_size, spare_blocks, budget, prefix_cache, overlap, count, tier_blocks
):
    rng = random.Random(seed)
    requests = draw_requests(rng, count, VOCAB, Lengths())
    way = Way(block_size, spare_blocks, budget, prefix_cache, overlap, tier_blocks)
    check(maker(name), rng, requests, way, nats=1e-9)


@pytest.mark.long
def test_preemption_by_either_means_really_happens_and_changes_nothing():
    """Guards the property test above: what was preempted is computed again, or comes back from host memory."""
    prompts = [[(i * 7 + j) % VOCAB for j in range(12)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [alone("dense", prompt, params).samples[0].token_ids for prompt in prompts]
    for tier_blocks in (0, 100):
        engine = make_engine(
            DECODERS["dense"], blocks=16, block_size=4, max_running=4, tier_blocks=tier_blocks,
            prefix_cache=tier_blocks > 0,
        )  # fmt: skip
        for index, prompt in enumerate(prompts):
            engine.add(prompt, params, request_id=f"r{index}")
        outputs = run(engine)
        stories = [outputs[f"r{i}"].story for i in range(4)]
        assert sum(story.preemptions for story in stories) > 0
        recomputed = sum(story.recomputed_tokens for story in stories)
        assert recomputed > 0 if not tier_blocks else recomputed < 4 * sum(s.preemptions for s in stories)
        assert [outputs[f"r{i}"].samples[0].token_ids for i in range(4)] == expected


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd_and_another_seed_another():
    prompt = list(range(10))
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(6)]
    engine = make_engine(DECODERS["dense"], blocks=64)
    for index, chosen in enumerate(params):
        engine.add(prompt, chosen, request_id=f"r{index}")
    outputs = run(engine)
    crowd = [outputs[f"r{i}"].samples[0].token_ids for i in range(6)]
    assert crowd == [alone("dense", prompt, chosen).samples[0].token_ids for chosen in params]
    assert len({tuple(tokens) for tokens in crowd}) == 6


def test_samples_of_one_request_differ_and_best_of_returns_the_likeliest():
    prompt = list(range(8))
    all_drawn = alone(
        "dense", prompt, SamplingParams(n=5, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    )
    best = alone("dense", prompt, SamplingParams(n=2, best_of=5, seed=3, max_tokens=12, ignore_eos=True))
    assert len({tuple(s.token_ids) for s in all_drawn.samples}) == 5
    ranked = sorted(all_drawn.samples, key=lambda s: -s.cumulative_logprob)
    assert [s.token_ids for s in best.samples] == [s.token_ids for s in ranked[:2]]

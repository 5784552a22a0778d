"""The engine's first promise: what else runs, and how the work is cut, shared, moved or overlapped, never
changes a request's tokens. Exact, on real models in float64."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.engine.params import SamplingParams
from tests.engine.tiny_engine import SPECS, VOCAB, make_decoder, make_engine, run

DECODERS = {name: make_decoder(name) for name in SPECS}


def draw_requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, int, str]]:
    prefix = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    drawn = []
    for _ in range(count):
        prompt = (prefix if rng.random() < 0.6 else []) + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))
        ]
        kind = rng.random()
        common = dict(max_tokens=rng.randrange(1, 20), ignore_eos=rng.random() < 0.5)
        if kind < 0.35:
            params = SamplingParams(temperature=0, **common)
        elif kind < 0.75:
            params = SamplingParams(
                temperature=rng.choice([0.5, 1.0, 2.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.8]),
                min_p=rng.choice([0.0, 0.05]), seed=rng.randrange(1000), n=rng.choice([1, 1, 2, 3]),
                repetition_penalty=rng.choice([1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, 0.3]), logit_bias={3: 1.5} if rng.random() < 0.3 else {},
                min_tokens=rng.choice([0, 1]), logprobs=rng.choice([None, 2]), **common,
            )  # fmt: skip
        elif kind < 0.9:
            params = SamplingParams(beam_width=rng.choice([2, 3]), **common)
        else:
            params = SamplingParams(temperature=0, prompt_logprobs=1, **common)
        drawn.append((prompt, params, rng.choice([0, 0, 1]), rng.choice(["", "", "tenant"])))
    return drawn


def result_of(output):
    return [(s.token_ids, s.finish_reason) for s in output.samples]


def alone(name: str, prompt, params):
    engine = make_engine(DECODERS[name], blocks=64, block_size=16, prefix_cache=False)
    engine.add(prompt, params, request_id="alone")
    return run(engine)["alone"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SPECS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    budget=st.sampled_from([5, 9, 64]),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    count=st.integers(1, 7),
)
def test_tokens_do_not_depend_on_what_happens_around_them(
    name, seed, block_size, spare_blocks, budget, prefix_cache, overlap, preemption, count
):
    rng = random.Random(seed)
    requests = draw_requests(rng, count)
    longest = max(len(prompt) + params.max_tokens for prompt, params, _, _ in requests)
    engine = make_engine(
        DECODERS[name], blocks=-(-longest // block_size) + spare_blocks, block_size=block_size, max_running=5,
        max_tokens_per_step=budget, prefix_cache=prefix_cache, preemption=preemption,
        host_blocks=60 if preemption == "swap" else 0, overlap=overlap,
    )  # fmt: skip
    victims = {f"r{i}" for i in range(count) if rng.random() < 0.15}
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)
    abort_at = rng.randrange(1, 12)

    def between(step: int) -> None:
        if step == abort_at:
            for victim in victims:
                engine.abort(victim)

    outputs = run(engine, between)
    engine.runner.close()
    assert len(outputs) == count, "a request was lost"
    for index, (prompt, params, _, _) in enumerate(requests):
        expected = alone(name, prompt, params)
        got = outputs[f"r{index}"]
        if f"r{index}" in victims and any(s.finish_reason == "abort" for s in got.samples):
            if params.beam_width is None and params.n == 1:
                tokens = got.samples[0].token_ids
                assert tokens == expected.samples[0].token_ids[: len(tokens)]
            continue
        assert result_of(got) == result_of(expected)
        if params.prompt_logprobs is not None:
            assert [p.token for p in got.prompt_logprobs] == prompt[1:]
            for ours, theirs in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_preemption_by_either_means_really_happens_and_changes_nothing():
    """Guards the property test above: the cases it draws do reach both ways of preemption."""
    prompts = [[(i * 7 + j) % VOCAB for j in range(12)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [alone("dense", prompt, params).samples[0].token_ids for prompt in prompts]
    for preemption, host_blocks in (("recompute", 0), ("swap", 100)):
        engine = make_engine(
            DECODERS["dense"], blocks=16, block_size=4, max_running=4, preemption=preemption,
            host_blocks=host_blocks, prefix_cache=False,
        )  # fmt: skip
        for index, prompt in enumerate(prompts):
            engine.add(prompt, params, request_id=f"r{index}")
        outputs = run(engine)
        stories = [outputs[f"r{i}"].story for i in range(4)]
        assert sum(story.preemptions for story in stories) > 0
        assert (sum(story.recomputed_tokens for story in stories) > 0) == (preemption == "recompute")
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

"""The sampler against a naive per-row reference, transformers' processors, and the chi-square test."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, StepPlan
from cumulo.engine.play.slot_table import SlotTable
from cumulo.engine.sampling.distribution import mix, uniform
from cumulo.engine.sampling.sampler import Drawn, draw
from tests import peers, thorough
from tests.engine.naive_sampler import naive_draw, naive_probabilities, naive_scores

EOS = 2
PROMPT = [5, 6, 5, 7]


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    outputs: list[list[int]] | None = None,
    seeds: list[int] | None = None,
    sample_indices: list[int] | None = None,
    rows: list[int] | None = None,
) -> Drawn:
    """Draw as the runner does: parameters and history lie in a slot table."""
    count = len(params)
    outputs = outputs or [[] for _ in params]
    seeds = seeds or list(range(count))
    table = SlotTable(count, 64, 16, eos_token_ids=(EOS,))
    begin = [
        NewSlot(i, PROMPT + outputs[i], len(PROMPT), [0] * 4, params[i], seeds[i],
                sample_indices[i] if sample_indices else 0)
        for i in range(count)
    ]  # fmt: skip
    table.apply(StepPlan(0, begin=begin))
    positions = np.array([len(PROMPT) + len(output) for output in outputs], dtype=np.int64)
    logit_rows = np.array(rows if rows is not None else range(count), dtype=np.int64)
    batch = table.draw_batch(np.arange(count), positions, logit_rows, logits.shape[-1])
    return draw(logits.clone(), batch)


@st.composite
def any_params(draw_value: st.DrawFn) -> SamplingParams:
    choose = draw_value
    return SamplingParams(
        temperature=choose(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 1.9])),
        top_k=choose(st.sampled_from([0, 0, 1, 3, 20, 500])),
        top_p=choose(st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.05])),
        min_p=choose(st.sampled_from([0.0, 0.0, 0.02, 0.4, 1.0])),
        repetition_penalty=choose(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=choose(st.sampled_from([0.0, 0.0, 0.9, -0.5])),
        frequency_penalty=choose(st.sampled_from([0.0, 0.0, 0.7, -1.1])),
        logit_bias=choose(st.sampled_from([{}, {}, {3: 2.0, 9: -4.0}, {8: -math.inf}])),
        min_tokens=choose(st.sampled_from([0, 0, 2])),
        stop_token_ids=choose(st.sampled_from([(), (11,)])),
    )


@settings(max_examples=thorough.examples(120), deadline=None)
@given(
    params=st.lists(any_params(), min_size=1, max_size=6),
    vocabulary=st.sampled_from([13, 64, 150, 700]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_every_draw_equals_the_naive_reference(
    params: list[SamplingParams], vocabulary: int, seed: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(len(params), vocabulary)) * spread
    outputs = [random.integers(0, min(vocabulary, 12), random.integers(0, 6)).tolist() for _ in params]
    seeds = random.integers(0, 2**60, len(params)).tolist()
    indices = random.integers(0, 4, len(params)).tolist()
    drawn = sample(torch.from_numpy(logits), params, outputs, seeds, indices)
    expected = [
        naive_draw(logits[i], params[i], PROMPT, outputs[i], seeds[i], indices[i], [EOS])
        for i in range(len(params))
    ]
    assert drawn.tokens.tolist() == expected
    assert not drawn.errors


@settings(max_examples=thorough.examples(40), deadline=None)
@given(params=st.lists(any_params(), min_size=2, max_size=8), seed=st.integers(0, 2**32))
def test_a_draw_does_not_depend_on_what_else_is_in_the_batch(params: list[SamplingParams], seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(len(params), 300)) * 3)
    params = [replace(p, logprobs=3) for p in params]
    outputs = [random.integers(0, 12, random.integers(0, 6)).tolist() for _ in params]
    together = sample(logits, params, outputs)
    order = random.permutation(len(params)).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [outputs[i] for i in order], order)
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [params[i]], [outputs[i]], [i])
        assert together.tokens[i] == alone.tokens[0] == shuffled.tokens[place]
        assert together.logprobs[i].rank == alone.logprobs[0].rank
        assert [token for token, _ in together.logprobs[i].top] == [t for t, _ in alone.logprobs[0].top]
        assert together.logprobs[i].logprob == pytest.approx(alone.logprobs[0].logprob, abs=1e-12)


CUTS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.4, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, top_p=0.9),
]


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    processors = peers.transformers.LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(peers.transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(peers.transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(peers.transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(peers.transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(peers.transformers.MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([PROMPT]), logits[None].clone())
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.long
@pytest.mark.parametrize("params", CUTS, ids=lambda p: f"k{p.top_k}-p{p.top_p}-min{p.min_p}-t{p.temperature}")
def test_the_empirical_distribution_is_that_of_transformers_processors(params: SamplingParams) -> None:
    draws = 20_000 if thorough.chosen else 6_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=40) * 2)
    expected = transformers_probabilities(logits, params).numpy()
    drawn = sample(logits[None], [params] * draws, rows=[0] * draws)
    observed = np.bincount(drawn.tokens, minlength=40)
    survivors = expected > 0
    assert not observed[~survivors].any()
    assert np.array_equal(
        naive_probabilities(naive_scores(logits.numpy(), params, PROMPT, []), params) > 0, survivors
    )
    common = survivors & (expected * draws >= 5)
    chi_square = ((observed - expected * draws)[common] ** 2 / (expected * draws)[common]).sum()
    # Wilson & Hilferty 1931: the cube root of chi-square / df is nearly normal; 4 sigma is one in 30,000.
    freedom = max(1, int(common.sum()) - 1)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


@pytest.mark.long
@pytest.mark.parametrize("params", CUTS, ids=lambda p: f"k{p.top_k}-p{p.top_p}-min{p.min_p}-t{p.temperature}")
def test_a_large_float32_vocabulary_gives_the_reference_tokens(params: SamplingParams) -> None:
    random = np.random.default_rng(3)
    logits = (random.normal(size=(4, 30_011)) * 2.5).astype(np.float32)
    logits[:, :30] += 8
    drawn = sample(torch.from_numpy(logits), [params] * 4)
    assert drawn.tokens.tolist() == [naive_draw(logits[i], params, PROMPT, [], i, 0) for i in range(4)]


@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
def test_top_p_is_exact_for_flat_and_peaked_rows_of_a_large_vocabulary_together(top_p: float) -> None:
    random = np.random.default_rng(4)
    spreads = np.array([0.0, 0.3, 1.0, 2.0, 6.0, 1.0])
    logits = random.normal(size=(6, 9001)) * spreads[:, None]
    logits[5, 17] += 30
    params = [SamplingParams(top_p=top_p, min_p=0.5 if i == 2 else 0.0) for i in range(6)]
    for seed in range(4 if thorough.chosen else 1):
        drawn = sample(torch.from_numpy(logits), params, seeds=[seed] * 6)
        assert drawn.tokens.tolist() == [
            naive_draw(logits[i], params[i], PROMPT, [], seed, 0) for i in range(6)
        ]


def test_the_n_samples_of_one_prompt_share_a_row_and_differ() -> None:
    logits = torch.randn(2, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams()] * 6
    drawn = sample(logits, params, seeds=[7] * 6, sample_indices=[0, 1, 2, 3, 4, 5], rows=[0, 0, 0, 1, 1, 1])
    expected = [naive_draw(logits[i // 3].numpy(), params[0], PROMPT, [], 7, i) for i in range(6)]
    assert drawn.tokens.tolist() == expected
    assert len(set(expected)) == 6


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [40, 70]] = 3.0
    assert sample(logits, [SamplingParams(temperature=0)] * 2).tokens.tolist() == [40, 0]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    drawn = sample(torch.zeros(1, 100), [SamplingParams(top_k=3)] * 200, rows=[0] * 200)
    assert set(drawn.tokens.tolist()) == {0, 1, 2}


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-3, 1e-30, 5e-324):
        drawn = sample(logits, [SamplingParams(temperature=temperature)])
        assert drawn.tokens[0] == logits.argmax()


def test_rows_with_nan_or_infinite_logits_fail_alone() -> None:
    logits = torch.randn(5, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(frequency_penalty=1, logprobs=1),
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(top_k=5),
    ]
    sound = sample(logits, params)
    broken = logits.clone()
    broken[0, 17] = math.nan
    broken[2] = math.nan
    broken[4, 3] = math.inf
    drawn = sample(broken, params)
    assert set(drawn.errors) == {0, 2, 4}
    assert "NaN" in drawn.errors[0]
    assert "infinite" in drawn.errors[4]
    assert drawn.tokens[[1, 3]].tolist() == sound.tokens[[1, 3]].tolist()
    assert drawn.logprobs == {1: sound.logprobs[1]}


def test_a_token_the_model_masks_itself_is_never_drawn() -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, [3, 64]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=50)):
        drawn = sample(logits, [params] * 100, rows=[0] * 100)
        assert set(drawn.tokens.tolist()) == {3, 64}


def test_bias_of_plus_infinity_forces_and_of_minus_infinity_forbids() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    best = int(logits[1].argmax())
    drawn = sample(
        logits,
        [
            SamplingParams(logit_bias={30: math.inf}),
            SamplingParams(temperature=0, logit_bias={best: -math.inf}),
        ],
    )
    assert drawn.tokens[0] == 30
    assert drawn.tokens[1] == logits[1].topk(2).indices[1]


def test_forbidding_every_token_is_an_error_of_that_draw() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(20), -math.inf))
    drawn = sample(torch.zeros(2, 20), [params, SamplingParams(temperature=0)])
    assert list(drawn.errors) == [0]
    assert "no token possible" in drawn.errors[0]


def test_end_tokens_are_impossible_before_min_tokens_and_possible_after() -> None:
    logits = torch.zeros(1, 20)
    logits[0, EOS], logits[0, 11], logits[0, 9] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(11, 10_000), logprobs=1)
    drawn = [sample(logits, [params], [output]) for output in ([], [1], [1, 1])]
    assert [int(d.tokens[0]) for d in drawn] == [9, 9, EOS]
    assert drawn[0].logprobs[0].rank == 1


def test_ignoring_end_of_sequence_does_not_hide_its_token() -> None:
    logits = torch.zeros(1, 20)
    logits[0, EOS] = 5.0
    assert sample(logits, [SamplingParams(temperature=0, ignore_eos=True)]).tokens[0] == EOS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_are_the_log_softmax_after_penalties_and_before_cuts(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 1000, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 3
    params = [
        SamplingParams(logprobs=5, temperature=0.2, top_k=2),
        SamplingParams(logprobs=0, temperature=2.0),
        SamplingParams(logprobs=100, repetition_penalty=1.7, presence_penalty=1.0, logit_bias={44: 3.0}),
    ]
    outputs = [[1], [], [9, 9, 10]]
    drawn = sample(logits, params, outputs)
    for i, param in enumerate(params):
        scores = naive_scores(logits[i].numpy(), param, PROMPT, outputs[i])
        expected = torch.log_softmax(torch.from_numpy(scores), dim=-1)
        entry = drawn.logprobs[i]
        assert entry.token == drawn.tokens[i]
        assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-5)
        assert entry.rank == 1 + int((expected > expected[entry.token]).sum())
        top = expected.topk(param.logprobs or 0)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_a_beam_draw_returns_candidates_for_twice_the_width() -> None:
    logits = torch.randn(1, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drawn = sample(logits, [SamplingParams(beam_width=4, n=2)])
    top = torch.log_softmax(logits[0], dim=-1).topk(8)
    assert [token for token, _ in drawn.logprobs[0].top] == top.indices.tolist()
    assert [value for _, value in drawn.logprobs[0].top] == pytest.approx(top.values.tolist())
    # width 1 with eos and two stop tokens: one continuation must survive them all
    few = sample(logits, [SamplingParams(beam_width=1, stop_token_ids=(3, 4))])
    assert len(few.logprobs[0].top) == 4


def test_more_alternatives_than_tokens_gives_them_all() -> None:
    drawn = sample(torch.randn(1, 7), [SamplingParams(logprobs=50)])
    assert len(drawn.logprobs[0].top) == 7


# -- random numbers ---------------------------------------------------------------------------------------
def test_the_mixing_function_is_splitmix64() -> None:
    # Published test vector of SplitMix64 with seed 1234567.
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * golden) % 2**64 for i in (1, 2, 3)], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_random_numbers_are_uniform_and_uncorrelated_along_every_coordinate() -> None:
    count = 50_000
    line, zero = np.arange(count), np.zeros(count, dtype=np.int64)
    for numbers in (
        uniform(line.astype(np.uint64), zero, zero),
        uniform(zero.astype(np.uint64), line, zero),
        uniform(zero.astype(np.uint64), zero, line),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 165  # 99 degrees, 1 in 30,000
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(count)


def test_negative_and_huge_seeds_are_accepted() -> None:
    logits = torch.randn(1, 500)
    tokens = [int(sample(logits, [SamplingParams()], seeds=[s]).tokens[0]) for s in (-1, 2**64 - 1, 2**70)]
    assert tokens[0] == tokens[1]

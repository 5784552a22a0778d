"""Sampling written out plainly, one row and one token at a time, in float64: the fast sampler's oracle."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.sampling.distribution import uniform


def naive_scores(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    eos_ids: Sequence[int] = (),
) -> NDArray[np.float64]:
    """Bias, penalties and forbidden tokens, one token at a time."""
    scores = logits.astype(np.float64).copy()
    for token, value in params.logit_bias.items():
        scores[token] += value
    for token in set(prompt + output):
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        for token in {*eos_ids, *params.stop_token_ids}:
            scores[token] = -math.inf
    return scores


def naive_probabilities(scores: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """What is left after temperature, top-k, top-p and min-p, by sorting everything."""
    probabilities = np.exp((scores - scores.max()) / params.temperature)
    probabilities /= probabilities.sum()
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        mass, wanted = 0.0, params.top_p * sum(probabilities[token] for token in ranked)
        kept = []
        for token in ranked:
            if mass >= wanted:
                break
            kept.append(token)
            mass += probabilities[token]
        ranked = kept
    best = probabilities.max()
    survivors = [token for token in ranked if probabilities[token] >= params.min_p * best]
    result = np.zeros(len(scores))
    result[survivors] = probabilities[survivors]
    return result / result.sum()


def naive_draw(
    logits: NDArray[np.float64],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    seed: int,
    sample_index: int,
    eos_ids: Sequence[int] = (),
) -> int:
    scores = naive_scores(logits, params, prompt, output, eos_ids)
    if params.greedy:
        return int(np.argmax(scores))
    number = uniform(
        *(np.array([v], dtype=np.uint64) for v in (seed, sample_index, len(prompt) + len(output)))
    )[0]
    cumulative = 0.0
    probabilities = naive_probabilities(scores, params)
    for token, probability in enumerate(probabilities):
        cumulative += probability
        if cumulative > number:
            return token
    return int(np.flatnonzero(probabilities)[-1])

"""How often rounding changes a sampled token: the same places of the same answers, computed in a large batch, in a
small one, and anew as a prompt, as after a move to another engine.

    python -m tests.engine.rounding_flips --kind latent --dtype float32

A token is drawn where a random number falls among the cumulative probabilities. Two computations draw differently
if it falls between a border of the one and the same border of the other: the chance is the sum over all borders of
how far they moved.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.llm import LLM
from tests.serve.tiny_model import KINDS, save_tiny_model

_TEMPERATURE = 1.1
_TOKENS = 120
_CUTS = (10, 40, 80, 115)  # output tokens after which an answer is continued elsewhere
_ASIDE = " Think of the sea, of bread and of rain first."


def params(number: int, tokens: int, vocabulary: int) -> SamplingParams:
    found = SamplingParams(
        temperature=_TEMPERATURE, seed=number, max_tokens=tokens, ignore_eos=True, logprobs=1
    )
    object.__setattr__(found, "logprobs", vocabulary)  # of all tokens: more than requests may ask for
    return found


def borders(found: TokenLogprobs) -> NDArray[np.float64]:
    """Cumulative probabilities in the order of token ids, as the sampler has them."""
    ids, logprobs = zip(*found.top, strict=True)
    weights = np.empty(len(ids))
    weights[list(ids)] = np.exp(np.array(logprobs) / _TEMPERATURE)
    sums = np.cumsum(weights)
    return np.asarray(sums / sums[-1])


def chance(one: TokenLogprobs, other: TokenLogprobs) -> float:
    return float(np.abs(borders(one) - borders(other)).sum())


def measure(kind: str, dtype: str, streams: int) -> tuple[float, float]:
    """The chance per draw: with another batch, and after a move."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder), 1024, kind=kind)
        with LLM(model, dtype=dtype, threads=1, kv_memory_gib=0.05, prefix_cache=False) as llm:
            size = llm.spec.vocab_size
            texts = [f"Say something long about number {number}." + 10 * _ASIDE for number in range(streams)]
            prompts = [list(llm.tokenizer.encode(text)) for text in texts]
            asked = [params(number, _TOKENS, size) for number in range(streams)]
            large = [one.samples[0] for one in llm.generate(prompts, asked)]
            small = [
                one.samples[0]
                for at in range(0, streams, 3)
                for one in llm.generate(prompts[at : at + 3], asked[at : at + 3])
            ]
            cuts = [(number, cut) for number in range(streams) for cut in _CUTS]
            moved = llm.generate(
                [prompts[number] + large[number].token_ids[:cut] for number, cut in cuts],
                [params(number, 1, size) for number, _ in cuts],
            )
    batches = [
        chance(one, other)
        for a, b in zip(large, small, strict=True)
        if a.token_ids == b.token_ids
        for one, other in zip(a.logprobs, b.logprobs, strict=True)
    ]
    moves = [
        chance(large[number].logprobs[cut], one.samples[0].logprobs[0])
        for (number, cut), one in zip(cuts, moved, strict=True)
    ]
    return float(np.mean(batches)), float(np.mean(moves))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="latent")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=24)
    chosen = parser.parse_args()
    batches, moves = measure(chosen.kind, chosen.dtype, chosen.streams)
    print(
        f"{chosen.kind}, {chosen.dtype}: a draw differs with a chance of {batches:.2g} in another batch, and of "
        f"{moves:.2g} after a move"
    )


if __name__ == "__main__":
    main()

"""The engine's first promise on the GPU's kernels, in batch-invariant mode: what else runs, and how the work is
cut, shared, moved or overlapped, changes no token and no bit of a log-probability.

On a GPU the models are wide enough for several tiles and in the type they are served in. Without one Triton's
interpreter plays a few small cases.
"""

import random
from typing import Any

import pytest
import torch

from tests.engine.tiny_cuda_engine import HAS_GPU, SPECS, make_decoder, make_engine, use_few_programs, widened  # isort: skip
from cumulo.engine.engine import Engine
from tests.engine.equivalence import Lengths, Way, check, draw_requests

pytestmark = pytest.mark.long
WAYS = 16 if HAS_GPU else 1


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)


def draw_way(rng: random.Random) -> Way:
    return Way(
        block_size=rng.choice([16, 32, 64]), spare_blocks=rng.randrange(5), prefix_cache=rng.random() < 0.5,
        budget=rng.choice([7, 33, 70, 200, 512] if HAS_GPU else [7, 20]), overlap=rng.random() < 0.5,
        tier_blocks=rng.choice([0, 60]),
    )  # fmt: skip


CASES = [(name, False) for name in SPECS] + [("dense", True)]
FEW = [pytest.param("dense", False, marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("name", "fp8"), CASES if HAS_GPU else FEW)
def test_in_batch_invariant_mode_nothing_around_a_request_changes_a_bit(name: str, fp8: bool) -> None:
    spec = widened(SPECS[name]) if HAS_GPU else SPECS[name]
    decoder = make_decoder(spec, torch.bfloat16 if HAS_GPU else torch.float32)
    roomy = dict(blocks=64, max_context=900 if HAS_GPU else 120, max_tokens_per_step=512 if HAS_GPU else 64)
    lengths = Lengths(prefix=300, own=300, answer=24) if HAS_GPU else Lengths(prefix=20, own=10, answer=4)

    def make(**options: Any) -> Engine:
        own = make_decoder(spec, decoder.dtype) if fp8 else decoder
        return make_engine(own, True, invariant=True, fp8=fp8, **{**roomy, **options})

    preemptions = 0
    for seed in range(WAYS):
        rng = random.Random(seed)
        requests = draw_requests(rng, rng.randrange(3, 8) if HAS_GPU else 2, spec.vocab_size, lengths)
        preemptions += check(make, rng, requests, draw_way(rng), nats=0.0)
    assert preemptions or not HAS_GPU

"""What the property tests of the engine's first promise share: random requests, random ways to run them, and the
comparison with each request alone. `test_equivalence` plays it in float64 on torch's operators,
`test_equivalence_cuda` in batch-invariant mode on the GPU's kernels.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cumulo.engine.decide.core.step_cost import StepCost
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from tests.engine.tiny_engine import run

Request = tuple[list[int], SamplingParams, int, str]  # prompt, parameters, priority, cache salt
MakeEngine = Callable[..., Engine]  # given the scheduler's options, and `overlap`


@dataclass(frozen=True, slots=True)
class Lengths:
    """Up to how many tokens requests have."""

    prefix: int = 40  # shared by most of them
    own: int = 20
    answer: int = 20


@dataclass(frozen=True, slots=True)
class Way:
    """How the requests are run; none of it may show in their tokens."""

    block_size: int
    spare_blocks: int  # beyond what the longest request needs alone
    budget: int  # tokens a step
    prefix_cache: bool
    overlap: bool
    tier_blocks: int = 0  # of host memory, for what leaves the device
    speculate: bool = False  # with drafts that are thought to cost nothing: as many as there can be


class FreeDrafts(StepCost):
    """A step takes as long whatever it drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.knows_rows = True

    def decode_s(self, rows: int, context: int) -> float:
        return 1.0

    def draft_s(self, rows: int, context: int) -> float:
        return 0.0


def draw_requests(rng: random.Random, count: int, vocabulary: int, lengths: Lengths) -> list[Request]:
    prefix = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, lengths.prefix))]
    drawn = []
    for _ in range(count):
        prompt = (prefix if rng.random() < 0.6 else []) + [
            rng.randrange(vocabulary) for _ in range(rng.randrange(1, lengths.own))
        ]
        kind = rng.random()
        common: dict[str, Any] = dict(
            max_tokens=rng.randrange(1, lengths.answer), ignore_eos=rng.random() < 0.5
        )
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


def run_alone(
    make_engine: MakeEngine, prompt: list[int], params: SamplingParams, **options: Any
) -> RequestOutput:
    engine = make_engine(**{"block_size": 16, "prefix_cache": False, **options})
    engine.add(prompt, params, request_id="alone")
    output = run(engine)["alone"]
    engine.runner.close()
    return output


def check(make_engine: MakeEngine, rng: random.Random, requests: list[Request], way: Way, nats: float) -> int:
    """Run them together in this way, some aborted on the way, and each alone in whole chunks: the same tokens and
    reasons, log-probabilities no more than `nats` apart. The number of preemptions there were."""
    longest = max(len(prompt) + params.max_tokens for prompt, params, _, _ in requests)
    engine = make_engine(
        blocks=-(-longest // way.block_size) + way.spare_blocks, block_size=way.block_size, max_running=5,
        tier_blocks=way.tier_blocks,
        max_tokens_per_step=way.budget, prefix_cache=way.prefix_cache, overlap=way.overlap,
        **({"speculate": "ngram"} if way.speculate else {}),
    )  # fmt: skip
    if engine.scheduler.speculation is not None:
        engine.scheduler.speculation.cost = FreeDrafts()
    victims = {f"r{i}" for i in range(len(requests)) if rng.random() < 0.15}
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)
    abort_at = rng.randrange(1, 12)

    def between(step: int) -> None:
        if step == abort_at:
            for victim in victims:
                engine.abort(victim)

    outputs = run(engine, between)
    engine.runner.close()
    assert len(outputs) == len(requests), "a request was lost"
    for index, (prompt, params, _, _) in enumerate(requests):
        expected = run_alone(make_engine, prompt, params)
        got = outputs[f"r{index}"]
        if f"r{index}" in victims and any(sample.finish_reason == "abort" for sample in got.samples):
            if params.beam_width is None and params.n == 1:
                tokens = got.samples[0].token_ids
                assert tokens == expected.samples[0].token_ids[: len(tokens)]
            continue
        assert _ends(got) == _ends(expected)
        ours, theirs = _log_probabilities(got), _log_probabilities(expected)
        assert len(ours) == len(theirs)
        assert all(abs(a - b) <= nats for a, b in zip(ours, theirs, strict=True))
        if params.prompt_logprobs is not None:
            assert [entry.token for entry in got.prompt_logprobs] == prompt[1:]
    return sum(output.story.preemptions for output in outputs.values())


def _ends(output: RequestOutput) -> list[tuple[list[int], str | None]]:
    return [(sample.token_ids, sample.finish_reason) for sample in output.samples]


def _log_probabilities(output: RequestOutput) -> list[float]:
    found = [entry.logprob for entry in output.prompt_logprobs or ()]
    for sample in output.samples:
        found += [entry.logprob for entry in sample.logprobs or ()]
    return found

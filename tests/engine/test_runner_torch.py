"""TorchRunner against plain recomputation of every sequence, in float64: tokens must be equal."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, StepPlan
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.slot_table import SlotTable
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder
from cumulo.spec.model import MLASpec, ModelSpec
from tests import thorough
from tests.engine.naive_sampler import naive_draw
from tests.engine.random_planner import RandomPlanner, Sequence

VOCABULARY, EOS = 50, 2
GREEDY = SamplingParams(temperature=0)
SPECS = {
    "grouped heads": ModelSpec("llama", VOCABULARY, 16, 2, 4, 2, 4, 24, 128),
    "latent": ModelSpec(
        "deepseek_v2", VOCABULARY, 16, 2, 2, 2, 8, 24, 128,
        mla=MLASpec(q_rank=None, kv_rank=6, nope_head_dim=4, rope_head_dim=4, value_head_dim=5),
    ),
    "sliding window": ModelSpec("mistral", VOCABULARY, 16, 2, 4, 2, 4, 24, 128, sliding_window=7),
}  # fmt: skip


@cache
def decoder(kind: str = "grouped heads") -> Decoder:
    """A tiny model whose logits are spread enough for every token to be drawn some time."""
    model = Decoder(SPECS[kind], torch.float64)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        spread = 0.0 if parameter.dim() == 1 else 0.6
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
        if name.endswith("norm.weight"):
            parameter.data += 1
    return model


def make_runner(model: Any, kind: str = "grouped heads", blocks: int = 24, **options: Any) -> TorchRunner:
    cache_ = KVCache(SPECS[kind], blocks, options.pop("block_size", 4), torch.float64)
    options = {"max_slots": 8, "max_context": 64, "eos_token_ids": (EOS,), **options}
    return TorchRunner(model, cache_, **options)


@torch.inference_mode()
def all_logits(tokens: list[int], kind: str = "grouped heads") -> torch.Tensor:
    """Every position's logits, computed at once from nothing."""
    length = len(tokens)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(length),
        slots=torch.arange(length),
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lengths=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logit_rows=torch.arange(length),
    )
    model = decoder(kind)
    return model.logits(model.forward(batch, KVCache(SPECS[kind], 1, length, torch.float64)))


def oracle(kind: str = "grouped heads") -> Callable[[Sequence], int]:
    def expected(sequence: Sequence) -> int:
        prompt, output = (
            sequence.tokens[: sequence.prompt_length],
            sequence.tokens[sequence.prompt_length :],
        )
        logits = all_logits(sequence.tokens, kind)[-1].numpy()
        return naive_draw(
            logits, sequence.params, prompt, output, sequence.seed, sequence.sample_index, [EOS]
        )

    return expected


def continuation(prompt: list[int], params: SamplingParams, seed: int, count: int) -> list[int]:
    """The tokens a request must get, one full recomputation each."""
    sequence = Sequence(list(prompt), len(prompt), params, seed, 0)
    for _ in range(count):
        sequence.tokens.append(oracle()(sequence))
    return sequence.tokens[len(prompt) :]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(top_k=10, min_p=0.01),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0, repetition_penalty=1.2, min_tokens=4, logit_bias={7: 1.5}),
]


@pytest.mark.long
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=thorough.examples(6), deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 2, 4, 5]))
def test_any_legal_order_of_work_gives_the_tokens_of_plain_recomputation(
    kind: str, overlap: bool, seed: int, block_size: int
) -> None:
    blocks, host_blocks = 80 // block_size, 60 // block_size
    runner = make_runner(
        decoder(kind), kind, blocks, block_size=block_size, host_blocks=host_blocks, overlap=overlap
    )
    planner = RandomPlanner(
        runner, oracle(kind), blocks=blocks, host_blocks=host_blocks, block_size=block_size, slots=8,
        longest=22, seed=seed,
    )  # fmt: skip
    random = planner.random
    for index in range(5):
        prompt = [random.randrange(3, VOCABULARY) for _ in range(random.randint(1, 12))]
        planner.add(
            Sequence(
                prompt, len(prompt), random.choice(PARAMS), random.randrange(2**63), 0, samples_left=index % 3
            )
        )
    for _ in range(22):
        planner.step()
    runner.close()
    assert planner.checked > 10


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_submitted_ahead_use_tokens_the_host_has_not_seen(overlap: bool) -> None:
    runner = make_runner(decoder(), overlap=overlap)
    prompts = [[5, 9, 11], [8, 8, 4, 30, 12]]
    begin = [NewSlot(i, p, len(p), [2 * i, 2 * i + 1], PARAMS[1], i) for i, p in enumerate(prompts)]
    pending = [
        runner.submit(StepPlan(0, begin=begin, slots=[0, 1], starts=[0, 0], counts=[3, 5], draw_rows=[0, 1],
                               draw_slots=[0, 1]))
    ]  # fmt: skip
    for step in range(3):
        pending.append(
            runner.submit(
                StepPlan(step + 1, slots=[1, 0], starts=[5 + step, 3 + step], counts=[1, 1], draw_rows=[0, 1],
                         draw_slots=[1, 0])
            )
        )  # fmt: skip
    results = [step.result() for step in pending]
    runner.close()
    assert [results[0].tokens[0], *(r.tokens[1] for r in results[1:])] == continuation(
        prompts[0], PARAMS[1], 0, 4
    )
    assert [results[0].tokens[1], *(r.tokens[0] for r in results[1:])] == continuation(
        prompts[1], PARAMS[1], 1, 4
    )
    times = [time for r in results for time in (r.started_s, r.finished_s)]
    assert times == sorted(times)


def test_logits_are_computed_only_where_something_is_drawn() -> None:
    rows: list[int] = []

    class Watching:
        def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
            rows.append(len(batch.logit_rows))
            return decoder().forward(batch, cache)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return decoder().logits(hidden)

    runner = make_runner(Watching())
    begin = [NewSlot(0, list(range(3, 15)), 12, [0, 1, 2], GREEDY, 0)]
    assert runner.submit(StepPlan(0, begin=begin, slots=[0], starts=[0], counts=[8])).result().tokens == []
    twin = NewSlot(1, list(range(3, 15)), 12, [0, 1, 2], GREEDY, 0, sample_index=1)
    runner.submit(
        StepPlan(1, begin=[twin], slots=[0], starts=[8], counts=[4], draw_rows=[0, 0], draw_slots=[0, 1])
    ).result()
    assert rows == [0, 1]


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    tokens = [int(t) for t in np.random.default_rng(0).integers(3, VOCABULARY, 30)]
    prompt_length = 28  # resumed with two output tokens: their log-probabilities are not of the prompt
    params = SamplingParams(temperature=0, prompt_logprobs=3)
    expected = torch.log_softmax(all_logits(tokens), dim=-1)
    for chunks in ([30], [7, 7, 16], [1] * 30, [27, 1, 2]):
        runner = make_runner(decoder())
        entries = []
        start = 0
        for index, count in enumerate(chunks):
            last = start + count == 30
            begin = [NewSlot(0, tokens, prompt_length, list(range(8)), params, 0)] if index == 0 else []
            plan = StepPlan(
                index, begin=begin, slots=[0], starts=[start], counts=[count], prompt_logprob_rows=[0]
            )
            plan.draw_rows, plan.draw_slots = ([0], [0]) if last else ([], [])
            result = runner.submit(plan).result()
            entries += result.prompt_logprobs[0]
            start += count
        assert result.tokens == [int(expected[-1].argmax())]
        assert [entry.token for entry in entries] == tokens[1:prompt_length]
        for position, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token]), abs=1e-10)
            assert entry.rank == 1 + int((expected[position] > expected[position, entry.token]).sum())
            assert [token for token, _ in entry.top] == expected[position].topk(3).indices.tolist()


def test_a_sequence_with_nan_fails_alone_and_leaves_no_trace_in_its_blocks() -> None:
    poisoned = Decoder(SPECS["grouped heads"], torch.float64)
    poisoned.load_state_dict(decoder().state_dict())
    poisoned.embed.weight.data[13] = math.nan
    runner = make_runner(poisoned)
    begin = [NewSlot(0, [5, 6, 13, 7], 4, [0, 1], GREEDY, 0), NewSlot(1, [5, 6, 7], 3, [2], GREEDY, 0)]
    result = runner.submit(
        StepPlan(0, begin=begin, slots=[0, 1], starts=[0, 0], counts=[4, 3], draw_rows=[0, 1],
                 draw_slots=[0, 1])
    ).result()  # fmt: skip
    assert list(result.errors) == [0]
    assert "NaN" in result.errors[0]
    assert result.tokens[1] == continuation([5, 6, 7], GREEDY, 0, 1)[0]
    again = runner.submit(
        StepPlan(1, end=[0], begin=[NewSlot(0, [9, 8], 2, [0], GREEDY, 0)], slots=[0], starts=[0], counts=[2],
                 draw_rows=[0], draw_slots=[0])
    ).result()  # fmt: skip
    assert not again.errors
    assert again.tokens == continuation([9, 8], GREEDY, 0, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_says_so_and_the_next_one_works(overlap: bool) -> None:
    runner = make_runner(decoder(), overlap=overlap)
    begin = [NewSlot(0, [5, 6, 7, 8, 9], 5, [0], GREEDY, 0)]
    too_few_blocks = runner.submit(StepPlan(0, begin=begin, slots=[0], starts=[0], counts=[5]))
    no_host_memory = runner.submit(StepPlan(1, swap_out=[(0, 0)]))
    unknown_token = runner.submit(StepPlan(2, slots=[0], starts=[3], counts=[3]))
    fine = runner.submit(
        StepPlan(3, begin=[NewSlot(0, [5, 6, 7], 3, [1], GREEDY, 0)], slots=[0], starts=[0], counts=[3],
                 draw_rows=[0], draw_slots=[0])
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="1 blocks of 4"):
        too_few_blocks.result()
    with pytest.raises(RuntimeError, match="no host blocks"):
        no_host_memory.result()
    with pytest.raises(RuntimeError, match="holds 5 tokens"):
        unknown_token.result()
    assert fine.result().tokens == continuation([5, 6, 7], GREEDY, 0, 1)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(StepPlan(4))


def test_a_plan_without_rows_only_changes_state() -> None:
    runner = make_runner(decoder())
    assert runner.submit(StepPlan(0)).result().tokens == []
    runner.submit(StepPlan(1, begin=[NewSlot(0, [5, 6, 7], 3, [1], GREEDY, 0)])).result()
    result = runner.submit(
        StepPlan(2, slots=[0], starts=[0], counts=[3], draw_rows=[0], draw_slots=[0])
    ).result()
    assert result.tokens == continuation([5, 6, 7], GREEDY, 0, 1)


@settings(max_examples=thorough.examples(50), deadline=None)
@given(seed=st.integers(0, 2**32), decode_only=st.booleans(), block_size=st.sampled_from([1, 3, 16]))
def test_the_forward_batch_says_what_a_loop_over_tokens_would(
    seed: int, decode_only: bool, block_size: int
) -> None:
    random = np.random.default_rng(seed)
    table = SlotTable(6, 40, block_size)
    plan = StepPlan(0)
    for slot in random.permutation(6)[: random.integers(1, 7)].tolist():
        tokens = random.integers(0, 1000, random.integers(1, 40)).tolist()
        blocks = random.integers(0, 500, -(-len(tokens) // block_size)).tolist()
        plan.begin.append(NewSlot(slot, tokens, 1, blocks, GREEDY, 0))
        start = int(random.integers(0, len(tokens)))
        plan.slots.append(slot)
        plan.starts.append(start)
        plan.counts.append(1 if decode_only else int(random.integers(1, len(tokens) - start + 1)))
    table.apply(plan)
    batch = table.forward_batch(table.rows(plan), np.array([0]))
    token_ids, positions, slots = [], [], []
    for new, start, count in zip(plan.begin, plan.starts, plan.counts, strict=True):
        for position in range(start, start + count):
            token_ids.append(new.tokens[position])
            positions.append(position)
            slots.append(new.blocks[position // block_size] * block_size + position % block_size)
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    for row, (new, start, count) in enumerate(zip(plan.begin, plan.starts, plan.counts, strict=True)):
        assert batch.query_starts[row + 1] - batch.query_starts[row] == count
        assert batch.context_lengths[row] == start + count
        used = -(-(start + count) // block_size)
        assert batch.block_tables[row, :used].tolist() == new.blocks[:used]

"""Beam search through the scheduler: whatever happens to blocks and slots, the search decides the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.beams import BeamSearch
from cumulo.engine.decide.core.request import Request
from tests import thorough
from tests.engine.cell_runner import candidates
from tests.engine.test_scheduler import VOCAB, expected_outputs, make, outputs_of, request, run


def searched_alone(made: Request) -> list[tuple[list[int], float]]:
    """The same search on whole contexts, without blocks or batches."""
    width = made.params.beam_width
    search = BeamSearch(
        width=width, n=made.params.n, length_penalty=made.params.length_penalty, stop_ids=made.stop_ids,
        max_tokens=made.output_limit,
    )  # fmt: skip
    beams, prompt = [[]], made.prompt.tolist()
    while True:
        step = search.advance([candidates(prompt + beam, VOCAB, 2 * width) for beam in beams])
        if search.done:
            return [(list(h.tokens), h.logprob) for h in search.best()]
        beams = [[*beams[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]


@settings(max_examples=thorough.examples(120), deadline=None)
@given(
    width=st.integers(1, 4),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    max_tokens=st.integers(1, 15),
    spare_blocks=st.integers(0, 30),
    block_size=st.sampled_from([1, 3, 4, 16]),
    overlap=st.booleans(),
    tier_blocks=st.sampled_from([0, 20]),
    prefix_cache=st.booleans(),
    rivals=st.integers(0, 3),
)
def test_beams_find_the_same_hypotheses_in_any_memory(
    width,
    prompt,
    max_tokens,
    spare_blocks,
    block_size,
    overlap,
    tier_blocks,
    prefix_cache,
    rivals,
):
    longest = max(len(prompt), 4) + max(max_tokens, 12)
    scheduler, runner = make(
        blocks=-(-longest // block_size) + spare_blocks, block_size=block_size, max_running=5,
        max_tokens_per_step=7, tier_blocks=tier_blocks, prefix_cache=prefix_cache,
    )  # fmt: skip
    searched = request("beams", prompt, max_tokens=max_tokens, beam_width=width, n=width)
    others = [request(f"other{i}", [i, 1, 2], seed=i, max_tokens=12) for i in range(rivals)]
    twin = request("beams2", prompt, max_tokens=max_tokens, beam_width=width)
    for one in (searched, *others, twin):
        scheduler.add(one)
    run(scheduler, runner, overlap=overlap)
    for one in (searched, twin):
        assert [(list(h.tokens), h.logprob) for h in one.beam.best()] == searched_alone(one)
    for one in others:
        assert outputs_of(one) == expected_outputs(one)


def test_beams_share_the_prompt_and_copy_only_what_they_write():
    scheduler, runner = make(blocks=40, block_size=4, max_running=4)
    scheduler.add(request("beams", list(range(17)), max_tokens=6, beam_width=4))
    most_used, copies = 0, 0
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        copies += len(plan.copies)
        most_used = max(most_used, scheduler.pool.used_count)
        scheduler.apply(plan, runner.submit(plan).result(), 0.0)
    assert copies > 0
    assert most_used <= 4 + 4 * 2  # 4 full blocks shared by all, at most 2 of its own for each beam

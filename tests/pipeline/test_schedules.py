"""Every schedule is right for every size, and its bubble and memory are the published ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import InvalidRequest
from cumulo.pipeline.decide.actions import Kind, Sends
from cumulo.pipeline.decide.catalog import FAMILIES, build, family
from cumulo.pipeline.decide.check import check, peak_live_activations
from cumulo.pipeline.decide.costs import ChunkCost, Costs
from cumulo.pipeline.decide.order import round_sizes
from cumulo.pipeline.simulate.timeline import simulate
from tests import thorough
from tests.pipeline.strategies import NAMES, chunk_costs, equal, shapes


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=thorough.examples(5))
@given(data=st.data())
def test_every_schedule_passes_the_checker_with_both_kinds_of_sends(name: str, data: st.DataObject) -> None:
    schedule = build(name, *data.draw(shapes(name)))
    buffered, rendezvous = check(schedule, Sends.BUFFERED), check(schedule, Sends.RENDEZVOUS)
    assert buffered.peak_live_activations == rendezvous.peak_live_activations
    assert buffered.bubble_ratio <= rendezvous.bubble_ratio  # a sender that waits can only be later


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=thorough.examples(25))
@given(data=st.data())
def test_peak_activations_are_the_published_ones(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(name))
    assert max(peak_live_activations(build(name, *shape))) == family(name).formula.peak(*shape)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=thorough.examples(6))
@given(data=st.data())
def test_bubbles_equal_the_published_formulas(name: str, data: st.DataObject) -> None:
    formula = family(name).formula
    # Enough micro-batches for the formula, as the papers assume.
    stages, micro_batches, chunks = data.draw(
        shapes(name).filter(lambda shape: shape[1] >= formula.least_micro_batches(shape[0]))
    )
    costs = data.draw(chunk_costs())
    if not formula.holds_for(costs):
        costs = equal(costs, None if name == "zb-v" else data.draw(st.integers(1, 9)))
    if name == "zb-h1":
        cost = costs.chunks[0]
        costs = replace(
            costs, chunks=(replace(cost, forward_s=cost.forward_s + data.draw(st.integers(0, 3))),)
        )
    assert formula.applies(stages, micro_batches, costs)
    timeline = simulate(build(name, stages, micro_batches, chunks), costs)
    idle_s = timeline.inner_bubble_s if formula.inner else timeline.bubble_s
    assert max(idle_s) == formula.bubble_s(stages, costs)
    # DualPipe's middle stages run one pair apart, so they are busier where overlapping saves time.
    if not costs.overlap_saving:
        assert min(idle_s) == max(idle_s)


@settings(max_examples=thorough.examples(10))
@given(stages=st.integers(2, 16), micro_batches=st.integers(2, 64))
def test_the_bubble_of_1f1b_and_gpipe_is_p_minus_1_over_m_plus_p_minus_1(
    stages: int, micro_batches: int
) -> None:
    """Narayanan et al. 2021, with the bubble as a share of the whole step."""
    for name in ("1f1b", "gpipe"):
        bubble = check(build(name, stages, micro_batches)).bubble_ratio
        assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), rel=1e-12)


@settings(max_examples=thorough.examples(6))
@given(stages=st.integers(2, 12), per_stage=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks_per_stage(
    stages: int, per_stage: int, chunks: int
) -> None:
    """The same model, so a chunk costs 1/chunks of a stage (Narayanan et al. 2021, section 2.2)."""
    plain = build("1f1b", stages, stages * per_stage)
    cut = build("interleaved-1f1b", stages, stages * per_stage, chunks)
    plain_s = simulate(plain, Costs.of_stage(plain, 1, 1, 1)).bubble_s[0]
    assert simulate(cut, Costs.of_stage(cut, 1, 1, 1)).bubble_s[0] == pytest.approx(
        plain_s / chunks, rel=1e-9
    )


@settings(max_examples=thorough.examples(3))
@given(stages=st.integers(2, 16), data=st.data())
def test_zero_bubble_schedules_have_a_third_of_the_bubble_and_none(stages: int, data: st.DataObject) -> None:
    """Qi et al. 2023: with f = i = w, ZB-H1 idles (p-1)/3m of its work, 1F1B (p-1)/m, ZB-V 0 inside its stages."""
    micro_batches = data.draw(st.integers(2 * stages - 1, 64))
    work_s = 3.0 * micro_batches
    assert simulate(build("1f1b", stages, micro_batches)).bubble_s[0] / work_s == (stages - 1) / micro_batches
    h1_s = simulate(build("zb-h1", stages, micro_batches)).bubble_s[0]
    assert h1_s / work_s == (stages - 1) / (3 * micro_batches)
    zero_bubble_v = simulate(build("zb-v", stages, micro_batches))
    assert set(zero_bubble_v.inner_bubble_s) == {0.0}
    assert set(zero_bubble_v.bubble_s) == {stages - 1.0}  # the staggered start: f a stage


@pytest.mark.parametrize("saving", (0.0, 0.25))
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (8, 20), (16, 32)])
def test_dualpipe_beats_1f1b_by_its_published_ratio(stages: int, micro_batches: int, saving: float) -> None:
    """DeepSeek-AI 2024, table 2: (PP/2-1)(F&B + B - 3W) against (PP-1)(F + B)."""
    costs = Costs((ChunkCost(1, 1, 1),), overlap_saving=saving)
    one_f_one_b = simulate(build("1f1b", stages, micro_batches), costs).bubble_s
    dualpipe = simulate(build("dualpipe", stages, micro_batches), costs).bubble_s
    published = (stages / 2 - 1) * (3 * (1 - saving) + 2 - 3) / ((stages - 1) * 3)
    assert max(dualpipe) / one_f_one_b[0] == pytest.approx(published, rel=1e-12)
    assert published < 1 / 3


def test_stages_keep_fewer_activations_towards_the_end_of_1f1b() -> None:
    assert peak_live_activations(build("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert peak_live_activations(build("zb-h1", 4, 8)) == (4, 4, 4, 4)
    assert peak_live_activations(build("gpipe", 4, 8)) == (8, 8, 8, 8)


@given(stages=st.integers(1, 16), micro_batches=st.integers(1, 64))
def test_rounds_of_interleaving_are_even_and_at_least_as_long_as_the_pipeline(
    stages: int, micro_batches: int
) -> None:
    sizes = round_sizes(stages, micro_batches)
    assert sum(sizes) == micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(stages, micro_batches)


def test_one_stage_is_a_pipeline_without_messages_or_bubble() -> None:
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"):
        timeline = simulate(build(name, 1, 4))
        assert timeline.bubble_s == (0.0,)
        assert all(span.action.kind.is_compute for span in timeline.spans[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dualpip", 4, 8), ("did you mean dualpipe",)),
        (("dualpipe", 5, 10), ("5 stages", "even", "6")),
        (("dualpipe", 4, 9), ("9 micro-batches", "10")),
        (("dualpipe", 4, 6), ("6 micro-batches", "8 or more")),
        (("dualpipe-v", 4, 7), ("7 micro-batches", "8 or more")),
        (("1f1b", 4, 8, 2), ("1 chunk", "interleaved-1f1b")),
        (("interleaved-1f1b", 4, 8, 1), ("2 or more chunks", "1f1b")),
        (("gpipe", 0, 8), ("1 or more",)),
        (("gpipe", 2, 0), ("1 or more",)),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_what_to_change(
    arguments: tuple[str, int, int], words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build(*arguments)
    assert all(word in str(refused.value) for word in words)


def test_names_are_forgiving_about_case_and_underscores() -> None:
    assert family("ZB_H1") is FAMILIES["zb-h1"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=thorough.examples(5))
@given(data=st.data())
def test_a_schedule_has_the_properties_that_its_family_declares(name: str, data: st.DataObject) -> None:
    """The planner trusts the family's words; that its placement is the schedule's is proved by the checker."""
    chosen = family(name)
    schedule = build(name, *data.draw(shapes(name)))
    actions = [action for order in schedule.orders for action in order]
    assert any(action.kind is Kind.BACKWARD_WEIGHT for action in actions) == chosen.splits_backward
    assert any(action.overlaps_next for action in actions) == chosen.overlaps
    assert {action.direction for action in actions} == set(range(2 if chosen.bidirectional else 1))
    for stage, order in enumerate(schedule.orders):
        held = chosen.placement.held_by(stage, schedule.stages, schedule.chunks_per_stage)
        assert {(action.chunk, action.direction) for action in order} == set(held)

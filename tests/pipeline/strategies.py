"""Random pipelines for the tests: any schedule, with stages and micro-batches it accepts."""

from dataclasses import replace

from hypothesis import strategies as st

from cumulo.pipeline.decide.actions import PipelineSchedule
from cumulo.pipeline.decide.catalog import FAMILIES, build
from cumulo.pipeline.decide.costs import ChunkCost, Costs
from tests import thorough

NAMES = tuple(FAMILIES)


@st.composite
def shapes(
    draw: st.DrawFn,
    name: str,
    most_stages: int = 16 if thorough.chosen else 10,
    most_micro_batches: int = 64 if thorough.chosen else 32,
) -> tuple[int, int, int]:
    """(stages, micro-batches, chunks per stage): of each at least two, where the schedule accepts them."""
    family = FAMILIES[name]
    stages = draw(st.integers(2, most_stages).filter(lambda p: not (family.even_stages and p % 2)))
    micro_batches = draw(
        st.integers(max(2, family.micro_batches_per_stage * stages), most_micro_batches).filter(
            lambda m: not (family.even_micro_batches and m % 2)
        )
    )
    chunks = draw(st.integers(2, 4)) if family.any_chunks else family.chunks_per_stage
    return stages, micro_batches, chunks


@st.composite
def schedules(draw: st.DrawFn, most_stages: int = 8, most_micro_batches: int = 24) -> PipelineSchedule:
    name = draw(st.sampled_from(NAMES))
    return build(name, *draw(shapes(name, most_stages, most_micro_batches)))


@st.composite
def chunk_costs(draw: st.DrawFn) -> Costs:
    """The same for all chunks, in whole seconds and eighths, so that sums are exact."""
    times = st.integers(1, 9).map(float)
    cost = ChunkCost(draw(times), draw(times), draw(times))
    return Costs((cost,), overlap_saving=draw(st.sampled_from((0.0, 0.125, 0.25))))


def equal(costs: Costs, weight_s: float | None = None) -> Costs:
    """The costs with f = i, and w as given or the same."""
    forward_s = costs.chunks[0].forward_s
    weight = forward_s if weight_s is None else min(weight_s, forward_s)
    return replace(costs, chunks=(ChunkCost(forward_s, forward_s, weight),))

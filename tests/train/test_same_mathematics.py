"""Every parallelism alone and many combinations: losses, norms and final weights are those of one process, in
float64 within 1e-9: after 3 steps and for some, with `--thorough` after 20 and for all: `make test-equalities`."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.errors import CumuloError
from cumulo.layout.layout import Layout, pipeline_chunks
from cumulo.pipeline.decide.catalog import FAMILIES
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig, TrainConfig, check_layout
from cumulo.train.run.verify import TOLERANCE, Outcome, largest_difference, train_alone
from tests.thorough import rare
from tests.train.layout_runs import SPECS, train_config, train_parallel

pytestmark = pytest.mark.long

ROWS, STEPS = 8, 3
COMBINATIONS, SEED = 44, 8

ALONE = {
    "data parallel": Layout(dp=2),
    "data parallel, four": Layout(dp=4),
    "zero 1": Layout(dp=2, zero=1),
    "zero 2": Layout(dp=2, zero=2),
    "zero 3": Layout(dp=2, zero=3),
    "hybrid sharding": Layout(dp=4, zero=3, shard=2),
    "hybrid sharding of the optimizer": Layout(dp=4, zero=1, shard=2),
    "tensor parallel": Layout(tp=2),
    "sequence parallel": Layout(tp=2, sequence_parallel=True),
    "gpipe": Layout(pp=2, schedule="gpipe"),
    "1f1b": Layout(pp=4, schedule="1f1b"),
    "interleaved 1f1b": Layout(pp=2, schedule="interleaved-1f1b"),
    "zb-h1": Layout(pp=4, schedule="zb-h1"),
    "zb-v": Layout(pp=2, schedule="zb-v"),
    "dualpipe": Layout(pp=4, schedule="dualpipe"),
    "dualpipe-v": Layout(pp=2, schedule="dualpipe-v"),
    "ring attention": Layout(cp=2),
    "ring attention, four": Layout(cp=4),
    "ulysses": Layout(cp=2, ulysses=2),
    "ring of ulysses": Layout(cp=4, ulysses=2),
}
# Each is a part of another, or of a combination below.
RARE = {
    "data parallel", "data parallel, four", "zero 1", "zero 3", "hybrid sharding of the optimizer",
    "tensor parallel", "gpipe", "interleaved 1f1b", "zb-h1", "dualpipe-v", "ring attention, four", "ulysses",
}  # fmt: skip
WITH_EXPERTS = {
    "expert parallel": Layout(dp=2, ep=2),
    "expert parallel, two of four": Layout(dp=4, ep=2),
    "expert parallel over context": Layout(dp=2, cp=2, ep=4),
    "tensor parallel": Layout(tp=2),
    "sequence parallel": Layout(tp=2, sequence_parallel=True),
    "zero 3": Layout(dp=2, zero=3),
    "zb-v": Layout(pp=2, schedule="zb-v"),
    "ring attention": Layout(cp=2),
    "ulysses": Layout(cp=2, ulysses=2),
}


@cache
def alone(spec: ModelSpec) -> Outcome:
    return train_alone(spec, train_config(Layout(), ROWS, micro=4, short=STEPS))


def config_for(layout: Layout, **changes: Any) -> TrainConfig:
    """Two micro-batches, or as many as the schedule wants."""
    rows = ROWS // layout.dp
    wanted = 2
    if layout.pp > 1:
        wanted = max(layout.pp, layout.pp * FAMILIES[layout.schedule].micro_batches_per_stage)
    return train_config(layout, ROWS, micro=max(1, rows // wanted), short=STEPS, **changes)


def check_same(name: str, layout: Layout) -> None:
    spec = replace(SPECS[name], layers=max(2, pipeline_chunks(layout)))
    difference, where = largest_difference(alone(spec), train_parallel(spec, config_for(layout)))
    assert difference < TOLERANCE, f"{name} under {layout}: {difference:.1e} at {where}"


@pytest.mark.parametrize("name", [*(name for name in ALONE if name not in RARE), *rare(*sorted(RARE))])
def test_a_parallelism_alone_changes_nothing(name: str) -> None:
    check_same("dense", ALONE[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if layout.ep == 2 else [pytest.mark.thorough])
        for name, layout in WITH_EXPERTS.items()
    ],
)
def test_a_parallelism_alone_changes_nothing_for_experts(name: str) -> None:
    check_same("experts", WITH_EXPERTS[name])


def drawn_layouts(count: int, seed: int) -> list[tuple[str, Layout]]:
    """Two or more parallelisms each, on 4 to 8 processes, that the model and its batch allow."""
    draw = random.Random(seed)
    found: list[tuple[str, Layout]] = []
    while len(found) < count:
        spec = draw.choice(list(SPECS))
        dp, tp, pp, cp = (draw.choice((1, 1, 2, 2, 4)) for _ in range(4))
        world = dp * tp * pp * cp
        if world not in (4, 8) or max(dp, tp, pp, cp) == world or tp == 4:
            continue
        if world == 8 and draw.random() < 0.5:
            continue  # they take longest
        ep = draw.choice([size for size in (1, 2, 4) if SPECS[spec].moe and dp * cp % size == 0] or [1])
        zero = draw.choice((0, 1, 2, 3)) if dp * cp > 1 else 0
        layout = Layout(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep,
            zero=zero,  # type: ignore[arg-type]
            shard=dp // 2 if zero and dp > 1 and draw.random() < 0.3 else None,
            sequence_parallel=tp > 1 and draw.random() < 0.5,
            ulysses=draw.choice([size for size in (1, 2) if cp % size == 0]),
            schedule=draw.choice(list(FAMILIES)) if pp > 1 else "1f1b",
        )  # fmt: skip
        if (spec, layout) not in found and not is_refused(spec, layout):
            found.append((spec, layout))
    return found


def is_refused(spec: str, layout: Layout) -> bool:
    try:
        check_layout(config_for(layout), SPECS[spec])
    except CumuloError:
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        pytest.param(spec, layout, id=f"{spec} {layout}", marks=[pytest.mark.thorough] if number % 24 else [])
        for number, (spec, layout) in enumerate(drawn_layouts(COMBINATIONS, SEED))
    ],
)
def test_combined_parallelisms_change_nothing(spec: str, layout: Layout) -> None:
    check_same(spec, layout)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sequence_parallel=True, pp=2, schedule="zb-v"), *rare(Layout(dp=2, cp=2, ep=2, zero=3))],
    ids=str,
)
def test_recomputed_layers_change_nothing(layout: Layout) -> None:
    spec = replace(SPECS["experts"], layers=max(2, pipeline_chunks(layout)))
    ranks = train_parallel(spec, config_for(layout, recompute=True))
    difference, where = largest_difference(alone(spec), ranks)
    assert difference < TOLERANCE, f"{difference:.1e} at {where}"


def test_muon_moves_whole_matrices_wherever_they_are() -> None:
    layout, optimizer = Layout(dp=2, pp=2, ep=2), OptimizerConfig("muon", learning_rate=1e-2)
    spec = replace(SPECS["experts"], layers=2)
    expected = train_alone(
        spec, replace(train_config(Layout(), ROWS, micro=4, short=STEPS), optimizer=optimizer)
    )
    ranks = train_parallel(spec, replace(config_for(layout), optimizer=optimizer))
    difference, where = largest_difference(expected, ranks)
    assert difference < TOLERANCE, f"{difference:.1e} at {where}"


def test_the_draw_has_every_parallelism_in_it() -> None:
    drawn = [layout for _, layout in drawn_layouts(COMBINATIONS, SEED)]
    assert {layout.zero for layout in drawn} == {0, 1, 2, 3}
    assert {layout.schedule for layout in drawn if layout.pp > 1} == set(FAMILIES)
    assert {layout.sequence_parallel for layout in drawn if layout.tp > 1} == {False, True}
    assert {layout.ulysses for layout in drawn if layout.cp > 1} == {1, 2}
    assert {layout.ep for layout in drawn} == {1, 2, 4}
    assert {layout.shard for layout in drawn} >= {None, 1, 2}
    assert {layout.world for layout in drawn} == {4, 8}

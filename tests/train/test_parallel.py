"""Groups and ModelRun: what a rank builds, and losses without gradients."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

import torch
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.layout.layout import Axis, Layout
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import to_device
from cumulo.train.decide.config import LoraConfig, TrainConfig
from cumulo.train.model.model import TrainingDecoder, initialise
from cumulo.train.run.model_run import ModelRun
from cumulo.train.run.verify import random_batch, start_weights, train_alone, train_rank
from tests.thorough import rare
from tests.train.layout_runs import DENSE, EXPERTS, train_config
from tests.train.pool import run_ranks

CPU = torch.device("cpu")


def sums_over_axes(rank: int, layout: Layout) -> dict[str, tuple[int, int]]:
    groups = Groups(layout, rank)
    found = {}
    for axis in get_args(Axis):
        total = torch.tensor(1 << rank)
        all_reduce(total, groups.group(axis))
        found[axis] = (int(total), groups.index(axis))
    return found


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, cp=4, ulysses=2, ep=4, zero=3, shard=1), *rare(Layout(dp=2, tp=2, pp=2))]
)
def test_a_group_talks_to_its_members_only(layout: Layout) -> None:
    for rank, found in enumerate(run_ranks(sums_over_axes, 8, layout)):
        for axis, (total, index) in found.items():
            members = layout.group(axis, rank)  # type: ignore[arg-type]
            assert total == sum(1 << member for member in members)
            assert members[index] == rank


def refused_layout(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        Groups(Layout(dp=4), rank)
    return str(caught.value)


def test_a_layout_of_another_size_than_the_world_is_refused() -> None:
    assert "has 4 ranks and 2 were started" in run_ranks(refused_layout, 2)[0]


def new_weights(
    rank: int, spec: ModelSpec, config: TrainConfig
) -> dict[str, list[tuple[tuple[slice, ...], Tensor]]]:
    run = ModelRun(spec, config, Groups(config.layout, rank), CPU)
    return {
        name: [
            (box.whole_slices, shard.tensor[box.held_slices].detach().clone())
            for box in shard.piece.cut_rows(shard.begin, shard.end)
        ]
        for name, shard in run.shards.items()
    }


@pytest.mark.parametrize("zero", [3, *rare(0, 1)])
def test_a_new_model_has_the_weights_it_has_in_one_process(zero: int) -> None:
    layout = Layout(dp=2, tp=2, pp=2, ep=2, schedule="zb-v", zero=zero)  # type: ignore[arg-type]
    shapes = parameter_shapes(EXPERTS)
    expected = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    initialise(expected, EXPERTS, seed=3)
    missing = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for found in run_ranks(new_weights, 8, EXPERTS, train_config(layout, rows=8)):
        for name, parts in found.items():
            for where, part in parts:
                assert torch.equal(part, expected[name][where])
                missing[name][where] = False
    assert not any(where.any() for where in missing.values())


def peak_growth_bytes(rank: int, spec: ModelSpec, config: TrainConfig) -> int | None:
    """By how much this process's resident memory grew at most while its part of a model was made; None: unknown."""
    groups = Groups(config.layout, rank)
    ModelRun(replace(spec, hidden=16, heads=2, kv_heads=2, ffn_hidden=16), config, groups, CPU)  # imports
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
    except OSError:
        return None
    before = resident_peak_bytes()
    ModelRun(spec, config, groups, CPU)
    return resident_peak_bytes() - before


def resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.long
@pytest.mark.parametrize("zero", [3, *rare(2)])
def test_what_is_shared_out_is_never_whole_in_memory(zero: int) -> None:
    spec = replace(DENSE, layers=8, hidden=384, heads=4, kv_heads=4, head_dim=96, ffn_hidden=1024)
    whole_bytes = 8 * sum(math.prod(shape) for shape in parameter_shapes(spec).values())
    layout = Layout(dp=4, zero=zero)  # type: ignore[arg-type]
    config = train_config(layout, rows=4, lora=LoraConfig(rank=1))  # so that weights are all there is
    grown = run_ranks(peak_growth_bytes, 4, spec, config)
    if None in grown:
        pytest.skip("this system does not say how much memory a process has used at most")
    assert max(grown) < 0.75 * whole_bytes  # a quarter, and one parameter at a time


def loss_without_gradients(rank: int, spec: ModelSpec, config: TrainConfig) -> float:
    groups = Groups(config.layout, rank)
    run = ModelRun(spec, config, groups, CPU, start_weights(spec, config.seed))
    rows = config.batch_sequences // config.layout.dp
    batch = random_batch(spec, config, 0)
    return run.token_sum(batch.rows(groups.place.dp * rows, (groups.place.dp + 1) * rows), 1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, schedule="dualpipe"),
        Layout(dp=2, zero=3),
        *rare(
            Layout(pp=2, cp=2, schedule="zb-v"),
            Layout(dp=2, pp=2),
            Layout(tp=2, sequence_parallel=True, pp=2, schedule="interleaved-1f1b"),
        ),
    ],
    ids=str,
)
def test_the_loss_without_gradients_is_that_of_one_process(layout: Layout) -> None:
    """With 3 micro-batches, which DualPipe could not train on."""
    config = train_config(layout, rows=3 * layout.dp)
    model = TrainingDecoder(DENSE, torch.float64)
    model.load_state_dict(start_weights(DENSE, config.seed))
    with torch.no_grad():
        expected = float(model(to_device(random_batch(DENSE, config, 0), CPU)).token_sum)
    for found in run_ranks(loss_without_gradients, layout.world, DENSE, config):
        assert found == pytest.approx(expected, rel=1e-12)


def losses_of_three_steps(rank: int, spec: ModelSpec, config: TrainConfig) -> list[float]:
    return train_rank(rank, spec, config).losses


@pytest.mark.long
@pytest.mark.parametrize("zero", [2, *rare(0)])
def test_half_precision_with_masters_goes_through_separate_weight_gradients(zero: int) -> None:
    """bfloat16 has three digits; gradients are summed and weights moved in float32."""
    config = train_config(
        Layout(dp=2, pp=2, schedule="zb-v", zero=zero),  # type: ignore[arg-type]
        rows=8,
        steps=3,
    )
    exact = train_alone(DENSE, replace(config, layout=Layout())).losses
    half = run_ranks(losses_of_three_steps, 4, DENSE, replace(config, dtype="bfloat16"))
    assert half[0] == half[1] == half[2] == half[3]
    assert half[0] == pytest.approx(exact, rel=0.02) and half[0] != exact

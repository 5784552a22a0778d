"""A state saved under one layout is loaded under any other: each rank finds its own part, to the last bit."""

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cumulo.checkpoint.play.boxes import read_parts, stored_shapes, write_parts
from cumulo.checkpoint.play.held import Held, all_parts, held_whole, own_parts
from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces, zero_rows
from cumulo.models.files.load import load_model
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec
from cumulo.train.decide.config import TrainConfig, new_spec
from cumulo.train.optimizer.sink import Shard
from cumulo.train.parallel.parallel_state import held_state
from cumulo.train.run.log import TrainRecord
from tests import thorough
from tests.train.ranked import tiny, train, write_texts

pytestmark = pytest.mark.long

DENSE = ModelSpec("llama", 64, 16, 4, 4, 4, 8, 24, 64, tied_embeddings=True, qkv_bias=True)
MOE = ModelSpec("qwen3_moe", 64, 16, 4, 4, 4, 8, 24, 64, qk_norm=True, moe=MoESpec(4, 2, 8, shared_hidden=8))
LATENT = ModelSpec("deepseek_v3", 64, 16, 4, 4, 4, 8, 24, 64, mla=MLASpec(8, 8, 4, 4, 8))


def drawn_layout(drawn: random.Random, spec: ModelSpec, most: int = 8) -> Layout:
    """Any layout of at most `most` ranks that this model can have."""
    while True:
        sizes = {axis: drawn.choice((1, 1, 2, 4)) for axis in ("dp", "tp", "pp", "cp")}
        zero = drawn.choice((0, 1, 2, 3))
        changes = {
            "ep": drawn.choice((1, 2, 4)) if spec.moe else 1,
            "zero": zero,
            "shard": drawn.choice((None, 2)) if zero else None,
            "sequence_parallel": drawn.random() < 0.5,
            "ulysses": drawn.choice((1, 1, 2)),
            "schedule": drawn.choice(("1f1b", "interleaved-1f1b", "zb-v", "dualpipe")),
        }
        try:
            layout = Layout(**sizes, **changes)  # type: ignore[arg-type]
            if layout.world <= most:
                pieces(spec, layout, 0)
                return layout
        except ConfigError:
            continue


def whole_state(spec: ModelSpec) -> dict[str, Tensor]:
    """Every element another number, so that one in a wrong place is found."""
    found, at = {}, 0
    for name, shape in parameter_shapes(spec).items():
        for full in (f"model.{name}", f"optimizer.{name}.exp_avg"):
            count = torch.Size(shape).numel()
            found[full] = torch.arange(at, at + count, dtype=torch.float64).view(shape)
            at += count
        found[f"optimizer.{name}.step"] = torch.tensor(float(at))
    return found


def rank_state(
    spec: ModelSpec, layout: Layout, rank: int, whole: Mapping[str, Tensor] | None
) -> dict[str, Held]:
    """What a rank holds, cut from the whole; None: not loaded yet."""
    shards: dict[str, Shard] = {}
    optimizer: dict[str, Tensor] = {}
    for name, piece in pieces(spec, layout, rank).items():
        members = layout.group(piece.zero_axis, rank)
        begin, end = 0, piece.shape[0]
        if layout.zero:
            begin, end = zero_rows(end, len(members), members.index(rank))
        for full in (f"model.{name}", f"optimizer.{name}.exp_avg"):
            local = torch.full(piece.shape, torch.nan, dtype=torch.float64)
            for box in piece.boxes:
                if whole is not None:
                    local[box.held_slices] = whole[full][box.whole_slices]
            if full.startswith("model."):
                shards[name] = Shard(local[begin:end], piece, begin, end, 0, True, torch.float64)
            elif end > begin:
                optimizer[f"{name}.exp_avg"] = local[begin:end].clone()
                count = torch.tensor(torch.nan) if whole is None else whole[f"optimizer.{name}.step"].clone()
                optimizer[f"{name}.step"] = count
    weights = {name: shard.tensor for name, shard in shards.items()}
    return held_state(shards, weights, optimizer, layout, rank)


def assert_same(own: Mapping[str, Held], expected: Mapping[str, Held]) -> None:
    assert own.keys() == expected.keys()
    for name, held in own.items():
        assert torch.equal(held.tensor, expected[name].tensor), name


@pytest.mark.parametrize("case", [*range(3), *thorough.rare(*range(3, 12))])
def test_any_layout_finds_its_parts_in_what_any_other_stored(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(case)
    if case % 2:
        monkeypatch.setattr(
            "cumulo.checkpoint.play.held.LEAST_BYTES", 256
        )  # boxes are shared out by rows, too
    spec = (DENSE, MOE, LATENT)[case % 3]
    before, after = drawn_layout(drawn, spec), drawn_layout(drawn, spec)
    whole = whole_state(spec)
    parts = []
    for rank in range(before.world):
        parts += own_parts(rank_state(spec, before, rank, whole), rank)
    assert len({(part.name, part.offset) for part in parts}) == len(parts)  # nothing twice
    write_parts(tmp_path, parts, None)
    assert {name: shape for name, (shape, _) in stored_shapes(tmp_path).items()} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    for rank in range(after.world):
        loaded = rank_state(spec, after, rank, None)
        read_parts(tmp_path, all_parts(loaded))
        assert_same(loaded, rank_state(spec, after, rank, whole))
    alone = held_whole({name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()})
    read_parts(tmp_path, all_parts(alone))
    assert_same(alone, held_whole(whole))


def test_a_state_is_stored_once_and_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cumulo.checkpoint.play.held.LEAST_BYTES", 256)
    whole, layout = whole_state(DENSE), Layout(dp=4, tp=2)
    stored = [
        sum(part.tensor.nbytes for part in own_parts(rank_state(DENSE, layout, rank, whole), rank))
        for rank in range(layout.world)
    ]
    assert sum(stored) == sum(tensor.nbytes for tensor in whole.values())
    assert max(stored) < 1.3 * sum(stored) / layout.world


@pytest.mark.long
@pytest.mark.thorough  # which `make test-equalities` is
@pytest.mark.parametrize("chain", range(4))
def test_a_run_that_changes_its_layout_after_every_step_learns_the_same(chain: int, tmp_path: Path) -> None:
    """Layouts of up to 8 processes in turn, seven with `--thorough`: saving under one and resuming under
    another, all against one process that never stopped."""
    drawn, experts, legs = random.Random(chain), chain % 2 == 1, 7 if thorough.chosen else 3
    source = write_texts(tmp_path / "texts.jsonl")
    _, expected, expected_held_out = train(tiny(tmp_path / "whole", source, Layout(), experts, steps=legs))
    layouts = [
        drawn_run_layout(drawn, tiny(tmp_path / "broken", source, Layout(), experts)) for _ in range(legs)
    ]
    for leg, layout in enumerate(layouts):
        config = tiny(tmp_path / "broken", source, layout, experts, steps=legs)
        heard, found, held_out = train(config, resume=leg > 0, stop_after=leg + 1)
        if leg > 0:
            assert f"resuming after step {leg}" in heard[-1]
        assert difference(found, expected[: leg + 1]) < 1e-9, layouts[: leg + 1]
    assert held_out == pytest.approx(expected_held_out, rel=1e-9)
    weights = [load_model(tmp_path / name / "model").decoder.parameters() for name in ("whole", "broken")]
    for one, many in zip(*weights, strict=True):
        torch.testing.assert_close(many, one, rtol=0, atol=1e-9 * float(one.abs().max()))


def drawn_run_layout(drawn: random.Random, config: TrainConfig) -> Layout:
    """One that `config` can be trained under: alone now and then, on 8 processes now and then."""
    spec = new_spec(config, 64, ())
    while True:
        layout = drawn_layout(drawn, spec, most=drawn.choice((1, 2, 4, 4, 8)))
        with contextlib.suppress(ConfigError):
            return dataclasses.replace(config, layout=layout).layout


def difference(found: list[TrainRecord], expected: list[TrainRecord]) -> float:
    """The largest, relative, of losses and norms; the place in the data must be the same."""
    assert [(record.step, record.tokens) for record in found] == [
        (record.step, record.tokens) for record in expected
    ]
    return max(
        abs(getattr(own, name) - getattr(other, name)) / getattr(other, name)
        for own, other in zip(found, expected, strict=True)
        for name in ("loss", "gradient_norm")
    )

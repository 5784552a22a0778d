"""Where one rank and several add up in the same order, and what is said where they do not."""

from dataclasses import replace

import pytest

from cumulo.engine.config import EngineConfig
from cumulo.errors import CumuloError
from cumulo.layout.equal_sums import equality_note, invariant_ep, parts_of, parts_within, unequal_sums
from cumulo.layout.serving import ServingLayout
from cumulo.spec.model import ModelSpec, MoESpec

DENSE = ModelSpec(
    family="llama", vocab_size=1024, hidden=4096, layers=2, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336,
    max_context=128,
)  # fmt: skip
MIXTURE = replace(DENSE, moe=MoESpec(128, 8, 768, shared_hidden=1408))


def test_parts_are_as_many_as_ranks_may_share_evenly() -> None:
    assert [parts_of(heads) for heads in (32, 28, 14, 9, 7)] == [4, 4, 2, 3, 1]
    assert [parts_of(32, ranks) for ranks in (2, 4, 8)] == [2, 1, 1]
    assert [parts_of(32, ranks, 8) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert [parts_of(12, ranks, 6) for ranks in (1, 6)] == [6, 1]
    assert parts_of(9, 3) == parts_of(28, 7) == 1


def test_parts_of_a_width_are_whole_steps_of_the_loop_on_any_number_of_ranks() -> None:
    assert [parts_within(width, 8, 64) for width in (512, 768, 1408, 100)] == [8, 4, 2, 1]
    for width in range(64, 4096, 64):
        for whole in (8, 4):
            parts = parts_within(width, whole, 64)
            for ranks in (2, 4, 8):
                if parts % ranks == 0:
                    assert ranks * parts_within(width // ranks, whole // ranks, 64) == parts


@pytest.mark.parametrize(
    ("spec", "layout", "most", "problem"),
    [
        (DENSE, ServingLayout(tp=2), 4, ""),
        (DENSE, ServingLayout(tp=4), 4, ""),
        (DENSE, ServingLayout(tp=8), 8, ""),
        (DENSE, ServingLayout(pp=5, dp=3), 4, ""),
        (replace(DENSE, heads=9, kv_heads=3, ffn_hidden=1536), ServingLayout(tp=3), 4, ""),
        (DENSE, ServingLayout(tp=8), 4, "attention output (4,096 numbers) is added up in 4 parts, which 8"),
        (replace(DENSE, heads=12), ServingLayout(tp=3), 4, "in 4 parts, which 3 ranks cannot share"),
        (replace(DENSE, ffn_hidden=1408), ServingLayout(tp=4), 4, "feed-forward (1,408 numbers) is added up in 2"),
        (MIXTURE, ServingLayout(tp=2, ep=2), 4, ""),
        (MIXTURE, ServingLayout(dp=4, ep=4), 4, ""),
        (MIXTURE, ServingLayout(tp=4, ep=4), 4, "the shared expert (1,408 numbers) is added up in 2 parts"),
        (MIXTURE, ServingLayout(tp=2), 4, "tp 2 cuts every expert; ranks that divide their number (128) hold"),
        (MIXTURE, ServingLayout(dp=8, ep=8), 4, "128 experts are added up in 4 parts, which 8 ranks cannot share"),
    ],
    ids=lambda value: str(value) if isinstance(value, ServingLayout) else "",
)  # fmt: skip
def test_what_ranks_add_up_differently_is_named(
    spec: ModelSpec, layout: ServingLayout, most: int, problem: str
) -> None:
    found = list(unequal_sums(spec, layout, most))
    assert bool(found) == bool(problem) and problem in "; ".join(found)


def test_experts_that_tp_would_cut_are_spread_whole_where_ranks_divide_them() -> None:
    layouts = (ServingLayout(tp=4), ServingLayout(tp=2, dp=2), ServingLayout(tp=3), ServingLayout(dp=2))
    assert [invariant_ep(MIXTURE, layout) for layout in layouts] == [4, 4, 1, 1]
    assert [invariant_ep(MIXTURE, ServingLayout(tp=2, ep=2)), invariant_ep(DENSE, layouts[0])] == [2, 1]


def test_4_bits_need_cuts_between_their_groups() -> None:
    narrow = replace(DENSE, ffn_hidden=7 * 128)
    assert not list(unequal_sums(narrow, ServingLayout(tp=2), 2))
    assert "inside a group of 128" in "".join(unequal_sums(narrow, ServingLayout(tp=2), 2, weights="int4"))


def test_whoever_starts_ranks_is_told_whose_bits_they_have() -> None:
    four, eight = ServingLayout(tp=4), ServingLayout(tp=8)
    assert equality_note(DENSE, four, 4, "auto", "bfloat16") == "batch-invariant, with the bits of one rank"
    note = equality_note(DENSE, eight, 8, "auto", "bfloat16")
    assert note.endswith("the bits of one rank that has --invariant-tp 8")
    note = equality_note(MIXTURE, ServingLayout(tp=2), 4, "auto", "bfloat16")
    assert note.startswith("batch-invariant, but the bits differ from one rank's: tp 2 cuts every expert")


def test_the_number_of_parts_follows_the_ranks_unless_it_is_given() -> None:
    def parts(**options: int) -> int:
        return EngineConfig(batch_invariant=True, **options).sum_parts

    assert [parts(), parts(tp=2), parts(tp=8), parts(dp=4, tp=2, ep=8)] == [4, 4, 8, 8]
    assert [parts(invariant_tp=8), parts(invariant_tp=8, tp=2)] == [8, 8]
    with pytest.raises(CumuloError, match="add batch_invariant, or omit it"):
        EngineConfig(invariant_tp=8)

"""Ranks on the GPU's kernels, in processes of their own that read each other's memory, say what one rank says."""

from typing import Any

import pytest

from tests.engine.cuda_ranks import Said, answers, play_rank, requests_of, spec_of  # isort: skip
from cumulo.layout.serving import ServingLayout
from cumulo.ranks.start import run_ranks
from tests.engine.tiny_cuda_engine import make_decoder, make_engine, use_few_programs
from tests.thorough import rare

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "layout"),
    rare(
        ("window", ServingLayout(pp=2)),
        ("dense", ServingLayout(pp=3)),
        ("latent experts", ServingLayout(pp=2)),
        ("window", ServingLayout(tp=2, pp=2)),
        ("experts", ServingLayout(dp=2, ep=2)),
        ("latent experts", ServingLayout(tp=2, dp=2, ep=4)),
        ("latent experts", ServingLayout(pp=2, dp=2, ep=2)),
        ("dense", ServingLayout(dp=2)),
    ),
    ids=str,
)
def test_gpu_ranks_draw_the_tokens_of_one_rank(
    name: str, layout: ServingLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    spec = spec_of(name, layout)
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True), requests)
    found = run_ranks(play_rank, layout.world, name, layout, requests, timeout_s=600)[0]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def play_invariantly(rank: int, name: str, layout: ServingLayout, requests: Any) -> Said:
    return play_rank(rank, name, layout, requests, invariant=True)


@pytest.mark.thorough
def test_in_the_batch_invariant_mode_ranks_with_other_rows_have_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_few_programs(monkeypatch)
    layout = ServingLayout(dp=2, ep=2)
    spec = spec_of("latent experts", layout)  # which have an expert that every token passes through
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True, invariant=True), requests)
    assert run_ranks(play_invariantly, 2, "latent experts", layout, requests, timeout_s=600)[0] == expected

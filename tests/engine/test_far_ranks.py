"""Ranks on the GPU's kernels that cannot read each other's memory, as on several hosts: they exchange messages, and
say what one rank says. Processes of their own, at addresses of their own."""

from typing import Any

import pytest

from tests.engine.cuda_ranks import Said, answers, play_rank, requests_of, spec_of  # isort: skip
from cumulo.layout.serving import ServingLayout
from cumulo.ranks.start import run_ranks
from tests.engine.tiny_cuda_engine import make_decoder, make_engine, use_few_programs
from tests.thorough import rare

pytestmark = pytest.mark.slow


def play_far(rank: int, name: str, layout: ServingLayout, requests: Any, invariant: bool = False) -> Said:
    return play_rank(rank, name, layout, requests, invariant=invariant, backend="gloo")


@pytest.mark.parametrize(
    ("name", "layout"),
    rare(
        ("dense", ServingLayout(tp=2)),
        ("experts", ServingLayout(tp=2, ep=2)),
        ("dense", ServingLayout(pp=2)),
        ("experts", ServingLayout(dp=2, ep=2)),
        ("window", ServingLayout(tp=2, pp=2)),
        ("latent experts", ServingLayout(tp=2, dp=2, ep=4)),
    ),
    ids=str,
)
def test_gpu_ranks_of_several_hosts_draw_the_tokens_of_one_rank(
    name: str, layout: ServingLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    spec = spec_of(name, layout)
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True), requests)
    found = run_ranks(play_far, layout.world, name, layout, requests, timeout_s=600)[0]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.thorough
def test_in_the_batch_invariant_mode_messages_give_the_bits_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_few_programs(monkeypatch)
    layout = ServingLayout(tp=2, ep=2)
    spec = spec_of("experts", layout)
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True, invariant=True), requests)
    assert run_ranks(play_far, 2, "experts", layout, requests, True, timeout_s=600)[0] == expected

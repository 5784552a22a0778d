"""The mixture of experts against every token going through its experts one by one."""

from dataclasses import replace

import pytest
import torch

from cumulo.kernels.cuda.moe import few as moe_few
from cumulo.kernels.cuda.moe import moe
from cumulo.models.linear import TensorKind
from cumulo.models.moe import ExpertRouter
from cumulo.spec.model import ModelSpec, MoESpec
from tests.kernels.cuda.tolerance import relative_error
from tests.thorough import rare


@pytest.fixture(autouse=True)
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes milliseconds, however large."""
    if device.type == "cpu":
        for name in ("UP", "DOWN"):
            monkeypatch.setattr(moe_few, name, moe_few.FewExpertsConfig(16, 1024, 4))


def layer(spec: MoESpec, tokens: int, hidden: int, device: torch.device, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device)

    width = spec.expert_hidden
    x = torch.randn(tokens, hidden, generator=generator).to(device)
    return (
        x,
        random(spec.experts, hidden) * 4,
        random(spec.experts, 2 * width, hidden),
        random(spec.experts, hidden, width),
    )


@pytest.mark.long
@pytest.mark.parametrize(  # one by one; sorted
    ("tokens", "scoring"),
    [(1, "sigmoid"), (5, "softmax"), (23, "sigmoid"), *rare((1, "softmax"), (5, "sigmoid"), (23, "softmax"))],
)
def test_a_mixture_is_the_weighted_sum_of_its_experts(
    tokens: int, scoring: str, device: torch.device
) -> None:
    spec = MoESpec(experts=6, experts_per_token=3, expert_hidden=24, scoring=scoring, routed_scale=1.5)  # type: ignore[arg-type]
    inputs = layer(spec, tokens, 40, device)
    bias = torch.linspace(-0.3, 0.3, 6, device=device) if scoring == "sigmoid" else None
    buffers = moe.MoEBuffers(spec, 40, tokens, torch.float32, device)
    before = torch.ones(tokens, 40, device=device)
    found = moe.mixture(*inputs, buffers, before.clone(), bias)
    exact = 1 + moe.reference(*(i.double() for i in inputs), spec, None if bias is None else bias.double())
    assert relative_error(found, exact) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 7])  # one by one; sorted
def test_ranks_that_hold_some_experts_each_sum_to_the_whole_mixture(
    tokens: int, device: torch.device
) -> None:
    spec = MoESpec(experts=6, experts_per_token=3, expert_hidden=24)
    x, router, gate_up, down = layer(spec, tokens, 40, device)
    found = torch.zeros(tokens, 40, device=device)
    for held in (range(4), range(4, 6)):
        buffers = moe.MoEBuffers(spec, 40, tokens, torch.float32, device)
        buffers.results.fill_(torch.nan)  # of experts that are elsewhere nothing is read
        buffers.activated.fill_(torch.nan)
        own = slice(held.start, held.stop)
        moe.mixture(x, router, gate_up[own], down[own], buffers, found, first_expert=held.start)
    exact = moe.reference(x.double(), router.double(), gate_up.double(), down.double(), spec)
    assert relative_error(found, exact) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, *rare(4)])
def test_in_the_invariant_mode_ranks_have_the_bits_of_one(ranks: int, device: torch.device) -> None:
    spec = MoESpec(experts=8, experts_per_token=3, expert_hidden=24)
    x, router, gate_up, down = layer(spec, 7, 40, device)

    def mixed(held: slice, onto: torch.Tensor) -> torch.Tensor:
        buffers = moe.MoEBuffers(spec, 40, 7, torch.float32, device)
        buffers.results.fill_(torch.nan)
        first = held.start or 0
        return moe.mixture(
            x, router, gate_up[held], down[held], buffers, onto, None, True, first_expert=first
        )

    before, count = torch.ones(7, 40, device=device), 8 // ranks
    whole = mixed(slice(None), before.clone())
    sums = [mixed(slice(at, at + count), torch.zeros_like(before)) for at in range(0, 8, count)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(before + sums[0], whole)


@pytest.mark.long
def test_experts_of_a_few_tokens_in_several_tiles(device: torch.device) -> None:
    """Rows and columns that tiles do not divide, and more than one tile of both."""
    spec = MoESpec(experts=8, experts_per_token=2, expert_hidden=25)
    x, _, gate_up, down = layer(spec, 2, 41, device)
    chosen = torch.tensor([6, 1, 3, 6], dtype=torch.int32, device=device)
    shares = torch.tensor([0.7, 0.3, 0.25, 0.75], device=device)
    activated, found = torch.full((4, 25), torch.nan, device=device), torch.ones(2, 41, device=device)
    tiles = moe_few.FewExpertsConfig(4, 16, 1)
    moe_few.experts_of_few(x, gate_up, down, chosen, shares, activated, found, (tiles, tiles))
    exact = torch.ones(2, 41, dtype=torch.float64, device=device)
    for choice, expert in enumerate(chosen.tolist()):
        gate, up = (gate_up[expert].double() @ x[choice // 2].double()).chunk(2)
        part = down[expert].double() @ (torch.nn.functional.silu(gate) * up)
        exact[choice // 2] += shares[choice].double() * part
    assert relative_error(found, exact) < 1e-6


def test_tiles_of_the_second_product_widen_with_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_few, "DOWN", moe_few.FewExpertsConfig(4, 128, 2))
    assert moe_few.down_config(768, 8) == moe_few.DOWN
    assert moe_few.down_config(14336, 2) == moe_few.FewExpertsConfig(4, 1024, 8)
    assert moe_few.down_config(2048, 8) == moe_few.FewExpertsConfig(4, 512, 8)


@pytest.mark.long
@pytest.mark.parametrize("group_score", ["max", "top2sum"])
def test_experts_are_chosen_within_the_best_groups(group_score: str, device: torch.device) -> None:
    spec = MoESpec(
        experts=15, experts_per_token=4, expert_hidden=16, scoring="sigmoid", groups=5, top_groups=2,
        group_score=group_score,  # type: ignore[arg-type]
    )  # fmt: skip
    inputs = layer(spec, 12, 32, device)
    bias = torch.linspace(-0.3, 0.3, 15, device=device).roll(4)
    buffers = moe.MoEBuffers(spec, 32, 12, torch.float32, device)
    found = moe.mixture(*inputs, buffers, torch.zeros_like(inputs[0]), bias)
    wide = [i.double() for i in inputs]
    assert relative_error(found, moe.reference(*wide, spec, bias.double())) < 1e-6
    chosen = buffers.chosen[: 12 * 4].view(12, 4).sort(-1).values
    assert all(len({expert // 3 for expert in row}) <= 2 for row in chosen.tolist())
    router = ExpertRouter(
        ModelSpec("tiny", 8, 32, 1, 1, 1, 16, 16, 8), spec, kind=TensorKind(torch.float64, device)
    )
    router.weight.data, router.selection_bias = wide[1], torch.nn.Parameter(bias.double())
    assert torch.equal(chosen, router(wide[0])[1].sort(-1).values.int())
    everywhere = replace(spec, groups=1, top_groups=1)
    free = moe.route_reference(wide[0], wide[1], everywhere, bias.double())[1].sort(-1).values
    assert not torch.equal(chosen, free.int())  # the groups did exclude someone


@pytest.mark.long
def test_many_tokens_are_sorted_by_expert_and_one_expert_may_get_all_or_none(device: torch.device) -> None:
    spec = MoESpec(experts=5, experts_per_token=2, expert_hidden=16)
    x, router, gate_up, down = layer(spec, 41, 32, device)
    router[3] = 0
    x[:, 0], router[:, 0] = 1.0, torch.tensor([30.0, 0, 0, -30, 0], device=device)  # nobody goes to expert 3
    buffers = moe.MoEBuffers(spec, 32, 41, torch.float32, device)
    found = moe.mixture(x, router, gate_up, down, buffers, torch.zeros_like(x))
    assert buffers.counts.tolist()[0] == 41 and buffers.counts.tolist()[3] == 0
    exact = moe.reference(*(i.double() for i in (x, router, gate_up, down)), spec)
    assert relative_error(found, exact) < 1e-6
    again = moe.mixture(x, router, gate_up, down, buffers, torch.zeros_like(x))
    assert torch.equal(found, again)


@pytest.mark.long
def test_tiles_of_swapped_operands_compute_the_same(device: torch.device) -> None:
    spec = MoESpec(experts=4, experts_per_token=2, expert_hidden=24)
    inputs = layer(spec, 19, 40, device)
    buffers = moe.MoEBuffers(spec, 40, 19, torch.float32, device)
    exact = moe.reference(*(one.double() for one in inputs), spec)
    for swapped in (False, True):
        tiles = moe.GroupedConfig(16, 16, 32, 4, 2, swapped)
        found = moe.mixture(*inputs, buffers, torch.zeros(19, 40, device=device), configs=(tiles, tiles))
        assert relative_error(found, exact) < 1e-6


@pytest.mark.long
def test_in_invariant_mode_a_token_does_not_feel_its_step_mates(device: torch.device) -> None:
    spec = MoESpec(experts=4, experts_per_token=2, expert_hidden=16)
    x, router, gate_up, down = layer(spec, 19, 32, device)
    buffers = moe.MoEBuffers(spec, 32, 19, torch.float32, device)
    together = moe.mixture(x, router, gate_up, down, buffers, torch.zeros_like(x), invariant=True)
    for token in (0, 7, 18):
        alone = moe.mixture(
            x[token : token + 1],
            router,
            gate_up,
            down,
            buffers,
            torch.zeros(1, 32, device=device),
            invariant=True,
        )
        assert torch.equal(alone[0], together[token])


@pytest.mark.long
@pytest.mark.parametrize("tokens", [3, 37])  # each choice a tile of its own; sorted
def test_a_nan_stays_with_its_token_and_chooses_experts_that_exist(tokens: int, device: torch.device) -> None:
    spec = MoESpec(experts=5, experts_per_token=2, expert_hidden=16)
    x, *weights = layer(spec, tokens, 32, device)
    buffers = moe.MoEBuffers(spec, 32, tokens, torch.float32, device)
    buffers.results.fill_(1e3)  # a step before may have left anything
    x[1] = torch.nan
    found = moe.mixture(x, *weights, buffers, torch.zeros_like(x))
    assert int(buffers.chosen[: 2 * tokens].max()) < spec.experts
    others = [token for token in range(tokens) if token != 1]
    exact = moe.reference(x[others].double(), *(weight.double() for weight in weights), spec)
    assert found[1].isnan().all() and relative_error(found[others], exact) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks what the tensor cores do")
def test_in_invariant_mode_few_and_many_tokens_have_the_same_bits_on_the_tensor_cores() -> None:
    device = torch.device("cuda")
    spec = MoESpec(experts=16, experts_per_token=4, expert_hidden=192)
    x, router, gate_up, down = (one.bfloat16() for one in layer(spec, 400, 512, device))
    buffers = moe.MoEBuffers(spec, 512, 400, torch.bfloat16, device)

    def mixed(rows: slice) -> torch.Tensor:
        return moe.mixture(x[rows], router, gate_up, down, buffers, torch.zeros_like(x[rows]), invariant=True)

    together = mixed(slice(None)).clone()
    for rows in (slice(7, 8), slice(3, 20), slice(100, 160), slice(200, 300)):
        assert torch.equal(mixed(rows), together[rows])

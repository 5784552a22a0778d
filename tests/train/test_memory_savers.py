"""8-bit moments, state and activations in the host's memory: less memory, the same or nearly the same steps."""

import math

import pytest
import torch
from torch import Tensor, nn

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import pieces
from cumulo.ranks.groups import Groups
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.model.offload import offload_activations
from cumulo.train.optimizer.adam8bit import BLOCK, Adam8bit, Quantised, levels
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer, gradient_sink
from tests.train.data_case import DENSE, Case, alone
from tests.train.pool import run_ranks


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- 8-bit Adam ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_levels_over_seven_decades(signed: bool) -> None:
    table = levels(signed)
    assert len(table) == len(table.unique()) == 256
    assert 0.0 in table and table.max() == 1.0
    assert (table.min() < 0) == signed
    smallest = table[table > 0].min()
    assert 1e-7 < smallest < 1e-6
    # Between 0.1 and 1 the levels are evenly close: that is where most of a block's numbers lie.
    dense = table[table > 0.1]
    assert (dense[1:] - dense[:-1]).max() < (0.02 if signed else 0.01)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 7])
def test_numbers_come_back_nearly_and_a_second_time_exactly(size: int, signed: bool) -> None:
    values = numbers(size) * 10 ** numbers(size, seed=1)
    values = values if signed else values.abs()
    kept = Quantised.zeros(size, signed, torch.device("cpu"))
    assert not kept.read(0, size).any()
    kept.write(0, values)
    found = kept.read(0, size)
    for block in range(0, size, BLOCK):
        part = slice(block, block + BLOCK)
        assert (found[part] - values[part]).abs().max() <= 0.01 * values[part].abs().max()
    again = Quantised.zeros(size, signed, torch.device("cpu"))
    again.write(0, found)
    assert torch.equal(again.codes, kept.codes)
    assert torch.equal(again.scales, kept.scales)


def test_one_large_number_does_not_spoil_other_blocks() -> None:
    values = numbers(2 * BLOCK)
    values[0] = 1e6
    kept = Quantised.zeros(len(values), True, torch.device("cpu"))
    kept.write(0, values)
    assert (kept.read(0, len(values)) - values)[BLOCK:].abs().max() < 0.05


def test_a_small_second_moment_never_becomes_nothing() -> None:
    root = torch.full((BLOCK,), 1e-12)
    root[0] = 1.0
    kept = Quantised.zeros(BLOCK, False, torch.device("cpu"))
    kept.write(0, root)
    assert bool((kept.read(0, BLOCK) > 0).all())


def regression(kind: str) -> tuple[float, float]:
    """Loss before and after training a small network on what another one says; float32."""
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(2))
    config = OptimizerConfig(kind=kind, learning_rate=3e-3, weight_decay=0.01, clip_norm=0)  # type: ignore[arg-type]
    optimizer = Optimizer(dict(student.named_parameters()), config, DENSE, master_weights=True)
    losses = []
    for step in range(150):
        x = numbers(64, 32, seed=step)
        loss = (student(x) - teacher(x).detach()).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step(1.0)
        optimizer.zero_grad()
    return losses[0], sum(losses[-10:]) / 10


def test_8_bit_moments_learn_as_32_bit_ones_do() -> None:
    before, wide = regression("adamw")
    _, narrow = regression("adamw8bit")
    assert wide < 0.1 * before
    assert math.isclose(narrow, wide, rel_tol=0.15)


def test_8_bit_moments_take_a_quarter_of_the_memory() -> None:
    matrix = {"layers.0.ffn.down.weight": nn.Parameter(numbers(256, 256))}
    rule = Adam8bit(matrix, OptimizerConfig(kind="adamw8bit"))
    assert rule.kept_bytes < 0.26 * 2 * 4 * 256 * 256


def test_8_bit_state_that_is_saved_and_loaded_goes_on_with_the_same_bits() -> None:
    config = OptimizerConfig(kind="adamw8bit", clip_norm=0)

    def fresh() -> tuple[dict[str, nn.Parameter], Optimizer]:
        shapes = {"embed.weight": (300, 16), "layers.0.ffn.down.weight": (70, 66), "final_norm.weight": (16,)}
        own = {name: nn.Parameter(numbers(*shape)) for name, shape in shapes.items()}
        return own, Optimizer(own, config, DENSE, master_weights=True)

    def move(own: dict[str, nn.Parameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for number, parameter in enumerate(own.values()):
                parameter.grad = numbers(*parameter.shape, seed=10 * step + number)
            optimizer.step(1.0)

    straight, optimizer = fresh()
    move(straight, optimizer, range(6))
    first, before = fresh()
    move(first, before, range(3))
    second, after = fresh()
    for name, tensor in after.state().items():
        tensor.copy_(before.state()[name])
    for name, parameter in second.items():
        parameter.data.copy_(first[name])
    after.loaded()
    move(second, after, range(3, 6))
    assert set(after.state()) == {
        f"{name}.{slot}" for name in straight for slot in ("step", "exp_avg", "exp_avg_sq")
    }
    for name, parameter in straight.items():
        assert torch.equal(second[name], parameter), name


# -- the host's memory -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_an_optimizer_in_the_hosts_memory_takes_the_same_steps(kind: str) -> None:
    plain = alone(Case(optimizer=OptimizerConfig(kind=kind)))  # type: ignore[arg-type]
    hosted = alone(Case(optimizer=OptimizerConfig(kind=kind, offload=True)))  # type: ignore[arg-type]
    assert set(hosted.state) == set(plain.state)
    for name, weight in plain.weights.items():
        assert torch.equal(hosted.weights[name], weight)


def hosted_steps(rank: int, zero: int) -> list[bool]:
    """Whether shards are moved in copies, and what a loaded checkpoint changes is seen by the model's next step."""
    layout = Layout(dp=2, zero=zero)  # type: ignore[arg-type]
    groups, model = Groups(layout, rank), Case().model()
    sink = gradient_sink({0: model}, pieces(DENSE, layout, rank), groups, wide_gradients=True)
    optimizer = ShardedOptimizer(sink, OptimizerConfig(offload=True), DENSE, True, groups)
    copies = all(
        moved.data_ptr() != sink.shards[name].tensor.data_ptr() for name, moved in optimizer.masters.items()
    )
    for weight in optimizer.weights().values():
        weight.fill_(0.5)
    optimizer.loaded()
    sink.begin()
    sink.last(0)
    Case().objective(model, 0, 4 * rank, 4 * rank + 4).backward()
    optimizer.take_gradients({name: torch.zeros_like(gradient) for name, gradient in sink.finish().items()})
    optimizer.step(0.0)
    return [copies, *(bool((weight == 0.5).all()) for weight in optimizer.weights().values())]


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_weights_that_are_loaded_reach_the_hosts_copies(zero: int) -> None:
    assert all(all(found) for found in run_ranks(hosted_steps, 2, zero))


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_that_were_away_give_the_same_gradients(recompute: bool) -> None:
    case = Case(recompute=recompute)
    plain, hosted = case.model(), case.model()
    offloading = offload_activations(hosted, least_bytes=64)
    for model in (plain, hosted):
        for first in (0, 4):  # two forwards before their backwards, as a pipeline has them
            case.objective(model, 0, first, first + 1).backward()
        (case.objective(model, 1, 0, 2) + case.objective(model, 1, 2, 4)).backward()
    assert offloading.moved_bytes > 0
    for ours, theirs in zip(hosted.parameters(), plain.parameters(), strict=True):
        # What comes back lies elsewhere, and MKL adds in another order where memory is aligned otherwise.
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


def test_with_recomputation_only_inputs_of_layers_go_away() -> None:
    moved = {}
    for recompute in (False, True):
        case = Case(recompute=recompute)
        model = case.model()
        offloading = offload_activations(model, least_bytes=64)
        case.objective(model, 0, 0, 4).backward()
        moved[recompute] = offloading.moved_bytes
    assert moved[True] < 0.5 * moved[False]


def test_weights_and_small_tensors_stay() -> None:
    case = Case()
    model = case.model()
    offloading = offload_activations(model, least_bytes=1 << 30)
    case.objective(model, 0, 0, 1).backward()
    assert offloading.moved_bytes == 0
    linear = nn.Linear(64, 64)
    only_input = offload_activations(linear, least_bytes=1)
    linear(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert only_input.moved_bytes == 2 * 64 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_activations_come_back_in_time() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).cuda()
    x = torch.randn(2048, 1024, device="cuda", requires_grad=True)
    plain(x).square().mean().backward()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    offloading = offload_activations(plain)
    plain(x).square().mean().backward()
    assert offloading.moved_bytes > 8 * 2048 * 1024 * 4
    for parameter, gradient in zip(plain.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]

"""The layer that is joined for a GPU computes what the plain one computes, and its kernels what torch does."""

import dataclasses

import pytest
import torch

from cumulo.kernels.cuda.elementwise import rope_cache
from cumulo.kernels.cuda.linear import fp8_blocks as blocks
from cumulo.kernels.cuda.linear import fp8_pair as pair
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import Batch, DeviceBatch, to_device
from cumulo.train.model.arithmetic import FP8, FP8_BLOCKS, WIDE, Arithmetic, product
from cumulo.train.model.model import TrainingDecoder, initialise
from tests.kernels.cuda.tolerance import relative_error
from tests.thorough import rare

SPEC = ModelSpec(
    "llama", vocab_size=48, hidden=48, layers=2, heads=3, kv_heads=1, head_dim=16, ffn_hidden=80, max_context=32,
    tied_embeddings=True,
)  # fmt: skip


def half(device: torch.device) -> torch.dtype:
    """What the 8-bit kernels take; the interpreter's bfloat16 is wrong."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def batch(device: torch.device) -> DeviceBatch:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, 48, (2, 16), generator=generator).numpy() for _ in range(2))
    positions = torch.cat((torch.arange(9), torch.arange(7))).expand(2, -1).numpy().copy()
    starts = torch.tensor([0, 9, 16, 25, 32], dtype=torch.int32).numpy()
    return to_device(Batch(tokens, targets, positions, starts, 32), device)


def gradients(
    spec: ModelSpec,
    arithmetic: Arithmetic,
    fused: bool,
    device: torch.device,
    recompute: bool | tuple[str, ...] = False,
) -> dict[str, torch.Tensor]:
    model = TrainingDecoder(
        spec, torch.float32, device, arithmetic=arithmetic, fused=fused, recompute=recompute
    )
    parameters = dict(model.named_parameters())
    initialise(parameters, spec, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith("norm.weight"):  # which begin as ones
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(device)
            else:
                parameter *= 4  # so that attention is not nearly even
    loss = model(batch(device)).token_sum
    loss.backward()
    found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    assert found.keys() == parameters.keys()
    return found | {"loss": loss.detach()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("qk_norm", "recompute"),
    [
        (False, False),
        (True, True),
        *rare((True, False), (False, True), (False, ("norm", "attention")), (True, ("norm", "attention"))),
    ],
    ids=str,
)
def test_the_joined_layer_has_the_gradients_of_the_plain_one(
    qk_norm: bool, recompute: bool | tuple[str, ...], device: torch.device
) -> None:
    spec = dataclasses.replace(SPEC, qk_norm=qk_norm)
    plain = gradients(spec, WIDE, False, device)
    for name, found in gradients(spec, WIDE, True, device, recompute).items():
        # A GPU's attention rounds to 10 bits between its products, and what was a tie falls either way.
        assert relative_error(found, plain[name]) < (3e-3 if device.type == "cuda" else 3e-6), name


@pytest.mark.long
def test_products_in_8_bits_follow_those_that_are_not(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the GPU's 8-bit products give half types only")
    wide, joined = (gradients(SPEC, arithmetic, True, device) for arithmetic in (WIDE, FP8))
    apart = gradients(SPEC, FP8, False, device)
    for name, found in joined.items():
        assert relative_error(found, apart[name]) < 3e-2, name  # rounded alike, but for the last bits before
        # e4m3 rounds by up to 2^-4 and e5m2 by 2^-3: independent errors of two layers' products.
        assert 1e-4 < relative_error(found, wide[name]) < 0.25 or name == "loss", name


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(pair.E4M3, (130, 70)), (pair.E5M2, (16, 32)), *rare((pair.E4M3, (16, 32)), (pair.E5M2, (130, 70)))],
)
def test_a_pair_is_the_rounded_matrix_and_its_transpose(
    dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, half(device))
    found, right = pair.fp8_pair(x, dtype), pair.reference(x, dtype)
    torch.testing.assert_close(found.scale, right.scale, rtol=1e-6, atol=0.0)
    # Multiplied by 1 / scale here and divided there: a tie may fall to the other side.
    off = (found.data.float() - right.data.float()).abs()
    assert (off > 0).float().mean() < 0.01 and off.max() <= right.data.float().abs().max() / 4
    assert torch.equal(found.transposed.float(), found.data.float().t())


def test_blocks_are_rounded_each_by_its_largest_along_both_sides(device: torch.device) -> None:
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).to(device, half(device))
    x[3] *= 1000  # an outlier costs its own blocks bits, and no other
    found, right = blocks.fp8_blocks(x), blocks.reference(x)
    assert found.scale.stride() == (1, 256) and found.transposed_scale.stride() == (1, 128)
    for data, scale, exact in (
        (found.data, found.scale, x),
        (found.transposed, found.transposed_scale, x.t()),
        (right.data, right.scale, x),
    ):
        near = blocks.dequantised(data, scale)
        assert (
            (near - exact.float()).abs() <= exact.float().abs() / 16 + scale.repeat_interleave(128, 1) * 2**-9
        ).all()
    torch.testing.assert_close(found.scale, right.scale, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found.transposed_scale, right.transposed_scale, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("arithmetic", [FP8, FP8_BLOCKS])
def test_the_three_products_in_8_bits_are_near(arithmetic: Arithmetic, device: torch.device) -> None:
    dtype = half(device)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, residual, upstream = draw(128, 256), draw(384, 256), draw(128, 384), draw(128, 384)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, residual)]
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, residual)]
    found = product(inputs[0], inputs[1], arithmetic, residual=inputs[2])
    right = exact[2] + exact[0] @ exact[1].t()
    assert relative_error(found.detach(), right.detach()) < 0.05
    grads = torch.autograd.grad(found, inputs, upstream)
    for one, other in zip(grads, torch.autograd.grad(right, exact, upstream.double()), strict=True):
        assert one.dtype == dtype and relative_error(one, other) < 0.08


def test_a_pair_of_zeros_stays_zero(device: torch.device) -> None:
    found = pair.fp8_pair(torch.zeros(16, 16, device=device, dtype=half(device)))
    assert not found.data.float().any() and found.scale == torch.tensor(pair.SMALLEST_SCALE)


@pytest.mark.parametrize("heads", [(3, 1), (2, 2)])
def test_rotation_in_place_and_back(heads: tuple[int, int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, dim = 5, 12
    total = heads[0] + 2 * heads[1]
    qkv = torch.randn((tokens, total * dim), generator=generator).to(device)
    angle = torch.randn((tokens, dim // 2), generator=generator).to(device)
    cos, sin = angle.cos(), angle.sin()
    states = qkv.view(tokens, total, dim).clone().requires_grad_()
    turned = rope_cache.rotate_reference(states[:, : heads[0] + heads[1]], cos, sin)
    right = torch.cat((turned, states[:, heads[0] + heads[1] :]), 1)
    rope_cache.rotate_(qkv, cos, sin, *heads)
    torch.testing.assert_close(qkv.view(tokens, total, dim), right.detach())
    # Heads before tokens, as attention's gradients may lie.
    upstream = torch.randn((total, tokens, dim), generator=generator).to(device).transpose(0, 1)
    parts = upstream.split((heads[0], heads[1], heads[1]), 1)
    (grad,) = torch.autograd.grad(right, states, upstream)
    torch.testing.assert_close(rope_cache.rotated_back(*parts, cos, sin), grad.flatten(1))


def test_a_product_in_8_bits_keeps_its_inputs_in_8_bits_only(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the GPU's 8-bit products give half types only")
    x, weight = (torch.randn(n, 32, requires_grad=True) for n in (16, 48))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        product(x, weight, FP8)
    wide = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.ndim]
    assert [tensor.data_ptr() for tensor in wide] == [weight.data_ptr()]

"""Dense attention for training, played by the interpreter at small sizes: results, gradients, and what must not
matter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.attention import flash_attention as door
from cumulo.kernels.cuda.attention.flash_attention_backward import BackwardConfig
from cumulo.kernels.cuda.attention.flash_attention_forward import ForwardConfig, launch_forward
from tests.kernels.cuda.operators import opcheck
from tests.kernels.cuda.tolerance import check_close, poisoned, relative_error
from tests.thorough import rare

SMALL = (ForwardConfig(32, 16, 4, 1), (BackwardConfig(32, 16, 4, 1), BackwardConfig(16, 32, 4, 1)))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that these sizes have inner, diagonal and broken ones."""
    for dim in (16, 24):
        monkeypatch.setitem(door.FORWARD, f"d{dim}", SMALL[0])
        monkeypatch.setitem(door.BACKWARD, f"d{dim}", SMALL[1])


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def starts_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def gradients(attend: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> list[Tensor]:
    """Of query, key and value, for upstream gradients that are not all alike."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, _ = attend(*leaves)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return list(torch.autograd.grad(out, leaves, upstream))


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "causal"),
    [
        ([45], 2, 1, 16, False),
        ([7, 0, 20, 1], 2, 2, 16, True),
        ([32, 16], 2, 1, 24, True),
        *rare(([45], 2, 1, 16, True), ([7, 0, 20, 1], 2, 2, 16, False), ([32, 16], 2, 1, 24, False)),
    ],
    ids=str,
)
def test_documents_attend_to_themselves_only_and_so_do_their_gradients(
    lengths: list[int], heads: int, kv_heads: int, dim: int, causal: bool, device: torch.device
) -> None:
    tokens = sum(lengths)
    query = random(tokens, heads, dim, seed=0, device=device)
    key, value = (random(tokens, kv_heads, dim, seed=s, device=device) for s in (1, 2))
    starts, scale = starts_of(lengths, device), dim**-0.5

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return door.reference(q, k, v, starts, starts, causal, scale)

    out, lse = door.packed_attention(query, key, value, starts, causal=causal)
    check_close(out, lambda *x: exact(*x)[0], query, key, value)
    assert relative_error(lse, exact(query.double(), key.double(), value.double())[1]) < 1e-5
    found = gradients(lambda *x: door.packed_attention(*x, starts, causal=causal), query, key, value)
    for index, gradient in enumerate(found):
        check_close(gradient, lambda *x, i=index: gradients(exact, *x)[i], query, key, value)


@pytest.mark.long
def test_gradients_are_the_same_bits_every_run(device: torch.device) -> None:
    query, key, value = (random(40, h, 16, seed=h, device=device) for h in (2, 1, 1))
    starts = starts_of([9, 31], device)
    runs = [gradients(lambda *x: door.packed_attention(*x, starts), query, key, value) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.long
def test_torchs_attention_and_its_gradients_are_the_same(device: torch.device) -> None:
    q, k, v = (random(2, 35, h, 16, seed=h, device=device, dtype=torch.float32) for h in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    upstream = random(2, 35, 4, 16, seed=9, device=device, dtype=torch.float32)

    def torchs(*x: Tensor) -> Tensor:
        q, k, v = (y.double().transpose(1, 2) for y in x)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    expected = torch.autograd.grad(torchs(*leaves), leaves, upstream.double())
    out = door.flash_attention(*leaves)
    assert relative_error(out.detach(), torchs(*leaves).detach()) < 1e-6
    for found, right in zip(torch.autograd.grad(out, leaves, upstream), expected, strict=True):
        assert relative_error(found, right) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_queries_may_be_fewer_or_more_than_their_keys(causal: bool, device: torch.device) -> None:
    """With more queries than keys and a causal mask the first queries see nothing: zeros, and no gradient."""
    queries, keys = [20, 40, 5], [50, 18, 0]
    query = random(65, 2, 16, seed=3, device=device)
    key, value = (random(68, 1, 16, seed=s, device=device) for s in (4, 5))
    bounds = starts_of(queries, device), starts_of(keys, device)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return door.reference(q, k, v, *bounds, causal, 0.25)

    out, lse = door.packed_attention(query, key, value, *bounds, causal=causal, scale=0.25)
    check_close(out, lambda *x: exact(*x)[0], query, key, value)
    assert torch.equal(lse == -torch.inf, exact(query, key, value)[1] == -torch.inf)
    assert (lse == -torch.inf).any() and not out[60:].any()
    ours = gradients(
        lambda *x: door.packed_attention(*x, *bounds, causal=causal, scale=0.25), query, key, value
    )
    for found, right in zip(
        ours, gradients(_without_empty_rows(exact), query.double(), key.double(), value.double()), strict=True
    ):
        assert relative_error(found, right) < 2e-3


def _without_empty_rows(
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Softmax of nothing but -inf has NaN gradients in torch: those rows are left out of its graph."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(query, key, value)
        keep = torch.isfinite(lse)
        return torch.where(keep.t()[..., None], out, 0.0), lse

    return call


@pytest.mark.long
def test_what_lies_past_the_last_document_becomes_zeros(device: torch.device) -> None:
    query, key, value = (random(80, 1, 16, seed=s, device=device) for s in range(3))
    starts = starts_of([13, 20], device)
    for x in (query, key, value):
        x[33:] = torch.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = door.packed_attention(*leaves, starts)
    assert not out[33:].any() and (lse[:, 33:] == -torch.inf).all() and out[:33].isfinite().all()
    upstream = torch.full_like(out, torch.nan)
    upstream[:33] = 1.0
    for gradient in torch.autograd.grad(out, leaves, upstream):
        assert not gradient[33:].any() and gradient[:33].isfinite().all()


def test_another_documents_nans_stay_there(device: torch.device) -> None:
    query, key, value = (random(50, 1, 16, seed=s, device=device) for s in range(3))
    starts = starts_of([25, 25], device)
    clean, _ = door.packed_attention(query, key, value, starts)
    for x in (query, key, value):
        x[25:] = torch.nan
    spoiled, _ = door.packed_attention(query, key, value, starts)
    assert torch.equal(spoiled[:25], clean[:25]) and spoiled[25:].isnan().all()


def test_heads_may_be_slices_of_one_wide_buffer_and_outputs_of_another(device: torch.device) -> None:
    tokens, dim, starts = 37, 16, starts_of([37], device)
    fused = random(tokens, 6 * dim + 8, seed=1, device=device)[:, : 6 * dim].view(tokens, 6, dim)
    query, key, value = fused.split([4, 1, 1], 1)
    wide = poisoned(tokens, 5 * dim, dtype=torch.float16, device=device)
    out, lse = (
        wide[:, : 4 * dim].view(tokens, 4, dim),
        poisoned(4, tokens, dtype=torch.float32, device=device),
    )
    launch_forward(query, key, value, starts, starts, True, 0.25, out, lse, SMALL[0])
    check_close(out, lambda *x: door.reference(*x, starts, starts, True, 0.25)[0], query, key, value)
    assert wide[:, 4 * dim :].isnan().all() and lse.isfinite().all()


@pytest.mark.long
def test_described_loads_give_the_same_bits(device: torch.device) -> None:
    query, key, value = (random(70, h, 16, seed=h, device=device) for h in (2, 1, 1))
    starts = starts_of([20, 50], device)
    results = []
    for descriptors in (False, True):
        out, lse = torch.empty_like(query), torch.empty(2, 70, device=device)
        config = ForwardConfig(32, 16, 4, 2, descriptors)
        launch_forward(query, key, value, starts, starts, True, 0.25, out, lse, config)
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.long
def test_it_is_a_torch_operator_with_fake_kernel_and_gradient(device: torch.device) -> None:
    query, key, value = (random(20, h, 16, seed=h, device=device).requires_grad_() for h in (2, 1, 1))
    starts = starts_of([5, 15], device)
    opcheck(door.flash_attention_op, (query, key, value, starts, starts, True, 0.25))


def test_shapes_that_do_not_fit_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="3 query heads do not divide"):
        door.flash_attention(torch.zeros(1, 4, 3, 16), *[torch.zeros(1, 4, 2, 16)] * 2)
    with pytest.raises(ValueError, match="the queries' head size"):
        door.flash_attention(torch.zeros(1, 4, 2, 16), *[torch.zeros(1, 4, 2, 32)] * 2)

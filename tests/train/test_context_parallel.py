"""Context parallelism against the whole model: losses and all gradients in float64."""

from dataclasses import replace

import pytest
import torch

from cumulo.layout.layout import Layout
from cumulo.ranks.ring_attention import Ring, ring_attention
from cumulo.train.data.packing import to_device
from cumulo.train.model.document_mask import DocumentMask
from cumulo.train.parallel.context_parallel import ScatteredDocuments
from tests.thorough import rare
from tests.train.split_case import DENSE, LATENT, SPARSE, TIED, Case, check, make_batch, rows

LAYOUTS = {
    "ring of 2": Layout(cp=2),
    "ring of 4": Layout(cp=4),
    "ulysses of 2": Layout(cp=2, ulysses=2),
    "ring of 2, ulysses of 2": Layout(cp=4, ulysses=2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_of_sequences_have_the_whole_models_loss_and_gradients(name: str) -> None:
    check(Case(DENSE, LAYOUTS[name], rows(2, 16, 3)))


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 3, 9, 30])
def test_windows_reach_into_other_ranks_pieces_and_no_further(window: int) -> None:
    check(Case(replace(TIED, sliding_window=window), Layout(cp=4), rows(2, 32, 1)))


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [Layout(cp=4, ulysses=2), Layout(cp=2, tp=2, sequence_parallel=True)], ids=str
)
def test_latent_attention_with_experts_is_cut_too(layout: Layout) -> None:
    check(Case(LATENT, layout, rows(2, 16, 2)))


def test_more_ranks_than_key_heads_get_copies_of_them() -> None:
    check(Case(replace(DENSE, kv_heads=2), Layout(cp=4, ulysses=4), rows(2, 16, 2)))


@pytest.mark.long
@pytest.mark.parametrize("layout", [
    Layout(cp=2, ep=2), Layout(dp=2, cp=2, ep=4), Layout(dp=2, cp=2, ep=2),
    Layout(cp=2, tp=2, ep=2, sequence_parallel=True),
], ids=str)  # fmt: skip
def test_the_balance_of_a_row_counts_all_its_pieces(layout: Layout) -> None:
    check(Case(SPARSE, layout, rows(4, 16, 2)))


@pytest.mark.long
@pytest.mark.parametrize(("own", "other"), [(0, 0), (1, 1), *rare((0, 1), (1, 0))])
def test_the_gpus_blocks_are_the_masked_ones(own: int, other: int) -> None:
    """Played by Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = to_device(make_batch(DENSE, ((5, 2, 9), (1, 1, 11, 3))), torch.device(device))
    ring = Ring(None)
    ring.size, ring.index = 2, own
    documents = ScatteredDocuments(batch, ring, None)
    masked, packed = documents.masked_blocks(None)[other], documents.packed_blocks()[other]
    assert masked is not None and packed is not None
    random = torch.Generator(device).manual_seed(own * 2 + other)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(2, tokens, heads, 16, generator=random, device=device)

    whole = [draw(8, 4), draw(8, 2), draw(8, 2)]
    states = [whole[0][:, masked.queries], *(part[:, masked.keys] for part in whole[1:])]
    out, log_sum = masked.forward(*states, 0.3)
    for actual, expected in zip(packed.forward(*states, 0.3), (out, log_sum), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    # as if other blocks had been merged in, so that a query that sees none of these keys has results, too
    merged = torch.logaddexp(log_sum, torch.full_like(log_sum, 0.4))
    upstream = (draw(out.shape[1], 4), merged, draw(out.shape[1], 4))
    pairs = zip(
        packed.backward(*states, *upstream, 0.3), masked.backward(*states, *upstream, 0.3), strict=True
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=5e-6, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [False, True])
def test_half_precision_is_merged_in_float32(kernel: bool) -> None:
    if kernel:
        pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = to_device(make_batch(DENSE, ((5, 2, 9), (1, 1, 11, 3))), torch.device(device))
    random = torch.Generator(device).manual_seed(7)
    exact = [
        torch.randn(32, heads, 16, generator=random, device=device).half().double().requires_grad_()
        for heads in (4, 2, 2)
    ]
    expected = DocumentMask.from_batch(batch).attend(exact[0], exact[1], exact[2], 0.3, None)
    upstream = torch.randn(expected.shape, generator=random, device=device).half()
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    documents, ring = ScatteredDocuments(batch, Ring(None), None), Ring(None)
    half = [states.detach().half().unflatten(0, (2, -1)).requires_grad_() for states in exact]
    blocks = documents.packed_blocks() if kernel else documents.masked_blocks(None)
    out = ring_attention(half[0], half[1], half[2], 0.3, ring, blocks)
    found = torch.autograd.grad(out, half, upstream.view_as(out))
    assert out.dtype == torch.float16
    for actual, want in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(
            actual.flatten(0, 1).double(), want, atol=4e-3 * float(want.detach().abs().max()), rtol=0
        )

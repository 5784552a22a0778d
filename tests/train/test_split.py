"""Parts of a model: chunks of its layers in one process, and every kind of cut at once in several."""

from dataclasses import replace

import pytest
import torch

from cumulo.errors import ModelError
from cumulo.layout.layout import Layout
from cumulo.layout.pieces import chunk_parts
from cumulo.train.data.packing import to_device
from cumulo.train.model.model import TrainingDecoder
from tests.train.split_case import DENSE, LATENT, SPARSE, TIED, Case, check, make_batch, rows, whole_model

pytestmark = pytest.mark.long

SPECS = {"dense": DENSE, "tied": TIED, "sparse": SPARSE, "latent": LATENT}


@pytest.mark.parametrize("name", SPECS)
def test_chunks_one_after_the_other_are_the_whole_model(name: str) -> None:
    spec = SPECS[name]
    whole = whole_model(spec)
    batch = to_device(make_batch(spec, rows(2, 12, 2)), torch.device("cpu"))
    expected = whole(batch)
    (expected.token_sum + (expected.balance_sum or 0.0)).backward()

    parts = chunk_parts(spec, Layout(pp=2))
    originals = dict(whole.named_parameters())
    chunks = [TrainingDecoder(spec, torch.float64, part=part) for part in parts]
    gradients: dict[str, torch.Tensor] = {}
    x, token_sum, balance_sum = None, torch.zeros(()), 0.0
    for chunk in chunks:
        chunk.load_state_dict({n: originals[n].detach() for n, _ in chunk.named_parameters()})
        losses = chunk(batch, x)
        x, token_sum = losses.hidden, token_sum + losses.token_sum
        balance_sum = balance_sum + (0.0 if losses.balance_sum is None else losses.balance_sum)
    assert x is None
    torch.testing.assert_close(token_sum, expected.token_sum, atol=0, rtol=1e-14)
    torch.testing.assert_close(balance_sum, expected.balance_sum or 0.0, atol=0, rtol=1e-14)
    (token_sum + balance_sum).backward()
    for chunk in chunks:
        for n, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                gradients[n] = gradients.get(n, 0.0) + parameter.grad  # a tied embedding is in two chunks
    assert set(gradients) == {n for n, original in originals.items() if original.grad is not None}
    for n, gradient in gradients.items():
        torch.testing.assert_close(gradient, originals[n].grad, atol=1e-13, rtol=1e-11, msg=n)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), [
    ("sparse", Layout(dp=2, tp=2, cp=2, ep=2, sequence_parallel=True)),
    ("latent", Layout(tp=2, cp=4, ep=4, ulysses=2)),
    ("tied", Layout(tp=2, cp=4, ulysses=2, sequence_parallel=True)),
], ids=str)  # fmt: skip
def test_all_cuts_together_have_the_whole_models_loss_and_gradients(name: str, layout: Layout) -> None:
    check(Case(SPECS[name], layout, rows(4, 16, 3)))


def test_layers_are_computed_again_across_ranks() -> None:
    layout = Layout(tp=2, cp=2, ep=2, sequence_parallel=True)
    check(Case(SPARSE, layout, rows(2, 16, 2), {"recompute": True}))


def test_a_model_that_can_only_be_planned_is_refused() -> None:
    with pytest.raises(ModelError, match="can be planned, but not run"):
        TrainingDecoder(replace(DENSE, gated_ffn=False))

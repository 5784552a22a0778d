"""Computing again instead of keeping: the same bits, less memory, and no product twice where none need be."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import to_device
from cumulo.train.model.model import TrainingDecoder
from tests.train.split_case import DENSE, LATENT, SPARSE, Case, check, make_batch, rows, whole_model

SPECS = {"sparse": SPARSE, "latent": LATENT}
CHEAP = ("norm", "activation")


def gradients(spec: ModelSpec, recompute: bool | Collection[str]) -> tuple[dict[str, Tensor], int, int]:
    """Of one batch: gradients, bytes kept from forward to backward, and arithmetic."""
    model = TrainingDecoder(spec, torch.float64, recompute=recompute)
    model.load_state_dict(whole_model(spec).state_dict())
    batch = to_device(make_batch(spec, rows(2, 16, 2)), torch.device("cpu"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            kept[pointer] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = model(batch)
        kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        kept.clear()
        (losses.token_sum / 20 + (losses.balance_sum or 0.0)).backward()
    found = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return found, kept_bytes, counter.get_total_flops()


@pytest.mark.long
@pytest.mark.parametrize("recompute", [True, ("norm",), ("activation",), ("attention",), CHEAP], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_the_same_bits_and_less_is_kept(name: str, recompute: bool | Collection[str]) -> None:
    expected, all_bytes, all_flops = gradients(SPECS[name], False)
    found, kept_bytes, flops = gradients(SPECS[name], recompute)
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter
    assert kept_bytes < all_bytes
    if recompute == CHEAP and name != "latent":  # whose first two products share one input: one is done again
        assert flops == all_flops
    if recompute is True:
        assert flops > all_flops


def test_operations_are_computed_again_across_ranks() -> None:
    layout = Layout(tp=2, cp=2, ep=2, sequence_parallel=True)
    check(Case(SPARSE, layout, rows(2, 16, 2), {"recompute": ("norm", "activation", "attention")}))


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(ConfigError, match="no operation softmax; name some of norm, activation, attention"):
        TrainingDecoder(DENSE, recompute=["norm", "softmax"])

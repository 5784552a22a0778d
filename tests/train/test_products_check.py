"""Which sizes 8-bit products take, asked without a GPU: what torch would say of one is given."""

from typing import Any

import pytest
import torch

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import TrainConfig, config_from
from cumulo.train.run.forecast import refuse_products

DENSE = ModelSpec(
    "llama",
    vocab_size=256,
    hidden=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn_hidden=384,
    max_context=64,
)


def config(products: str, **changes: Any) -> TrainConfig:
    data = {"products": products, "dtype": "bfloat16", "micro_batch": 2, "batch_sequences": 16, **changes}
    sizes = {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_hidden": 384, "vocab_multiple": 256}
    return config_from({"model": sizes, "data": {"sequence_length": 64}, **data})


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


def test_sizes_that_divide_are_taken() -> None:
    for products in ("wide", "fp8", "fp8_blocks"):
        refuse_products(config(products), DENSE, torch.device("cuda"))
    refuse_products(config("fp8", layout={"tp": 2}), DENSE, torch.device("cuda"))


def test_a_slice_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"divide by 128; layers.0.ffn.down.weight of a rank is 256 x 192"):
        refuse_products(config("fp8_blocks", layout={"tp": 2}), DENSE, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"tokens in multiples of 128; a micro-batch has 64 a rank"):
        refuse_products(config("fp8_blocks", layout={"cp": 2}), DENSE, torch.device("cuda"))


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    refuse_products(config("fp8"), DENSE, torch.device("cuda"))
    with pytest.raises(
        ConfigError, match=r"capability 9.0 or more\), and this run is on NVIDIA H200, of .* 8.9"
    ):
        refuse_products(config("fp8_blocks"), DENSE, torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"products": "fp8"}, "products: fp8 goes with dtype: bfloat16, and dtype is float32"),
        ({"compile": True, "layout": {"pp": 2}}, "compile does not know pipelines"),
        ({"expert_rebalance_every_steps": 5}, "layout.ep is 1: set both or none"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(changes)


def test_schedules_that_part_backward_are_known() -> None:
    from cumulo.layout.layout import splits_backward

    parted = [
        name
        for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe")
        if splits_backward(Layout(pp=2, schedule=name))
    ]
    assert parted == ["zb-h1", "zb-v", "dualpipe"]
    assert not splits_backward(Layout(schedule="zb-h1"))

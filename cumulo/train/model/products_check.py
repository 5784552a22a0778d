"""Whether a device and a model's sizes can have products in 8 bits. The trainer asks before it allocates."""

import torch

from cumulo.errors import ConfigError
from cumulo.layout.pieces import pieces
from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import parameter_shapes
from cumulo.train.decide.config import TrainConfig
from cumulo.train.model.arithmetic import ARITHMETICS

# Ada has 8-bit products; scales for blocks of 128 came with Hopper.
_LEAST_CAPABILITY = {"fp8": (8, 9), "fp8_blocks": (9, 0)}


def refuse_products(config: TrainConfig, spec: ModelSpec, device: torch.device) -> None:
    products = config.products
    if products == "wide":
        return
    found = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = (
            f"{torch.cuda.get_device_name(device)}, of compute capability {'.'.join(map(str, capability))}"
        )
    if device.type != "cuda" or capability < _LEAST_CAPABILITY[products]:
        least = ".".join(map(str, _LEAST_CAPABILITY[products]))
        raise ConfigError(
            f"products: {products} needs a GPU with 8-bit products (compute capability {least} or more), and this "
            f"run is on {found}; leave it wide"
        )
    divisor = ARITHMETICS[products].divisor
    tokens = config.micro_batch * config.data.sequence_length // config.layout.cp
    if tokens % divisor:
        raise ConfigError(
            f"products: {products} needs tokens in multiples of {divisor}; a micro-batch has {tokens} a rank"
        )
    for name, piece in pieces(spec, config.layout, 0, parameter_shapes(spec)).items():
        inner = name.startswith("layers.") and ".router." not in name and ".experts." not in name
        if inner and len(piece.shape) == 2 and any(size % divisor for size in piece.shape):
            rows, columns = piece.shape
            raise ConfigError(
                f"products: {products} needs matrices whose sizes divide by {divisor}; {name} of a rank is "
                f"{rows} x {columns}"
            )

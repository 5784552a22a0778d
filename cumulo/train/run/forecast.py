"""Forecast: what a run will take in memory and time, said before it starts and held against it at the end. Owned by
the trainer."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cumulo.base.machine import available_memory
from cumulo.base.quantities import LedgerLine
from cumulo.errors import ConfigError
from cumulo.kernels.cuda.registry import gpu_memory
from cumulo.layout.pieces import pieces
from cumulo.ranks.launch import local_ranks
from cumulo.ranks.team import Team
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import TrainConfig
from cumulo.train.decide.ledger import entries, predict, refuse_if_too_large
from cumulo.train.model.arithmetic import ARITHMETICS
from cumulo.train.run.metrics import Ceiling, peak_memory_bytes, training_flops_per_token
from cumulo.train.run.model_run import ModelRun, StepLoss


class Forecast:
    def __init__(self, config: TrainConfig, spec: ModelSpec, device: torch.device, team: Team) -> None:
        """Before anything is allocated; what does not fit is refused, on all ranks alike."""
        on_gpu = device.type == "cuda"
        refuse_products(config, spec, device)
        self.config, self.device = config, device
        length = config.data.sequence_length
        self.flops_per_token = training_flops_per_token(spec, length, config.lora is not None)
        self.ceiling = Ceiling(device, getattr(torch, config.dtype), config.layout.world)
        name = torch.cuda.get_device_name(device) if on_gpu else None
        self._step_flops = self.flops_per_token * config.batch_sequences * length
        self.prediction = predict(config, spec, name, self._step_flops, self.ceiling.flops)
        self._kept_bytes: int | None = None
        if self.prediction is not None:
            memory = self.prediction.memory
            free = gpu_memory() if on_gpu else available_memory() // local_ranks()
            team.together(lambda: refuse_if_too_large(memory, free, on_gpu, config))

    def mfu(self, tokens_per_s: float) -> float:
        return self.ceiling.share(tokens_per_s * self.flops_per_token)

    def gradients(self, run: ModelRun, batch: Batch, loss_tokens: int) -> StepLoss:
        """In the first step, what is kept for backward is counted: on a CPU, where nothing else would say."""
        config = self.config
        counts = self._kept_bytes is None and self.prediction is not None and self.device.type == "cpu"
        if not counts or config.compile or config.offload_activations:
            return run.gradients(batch, loss_tokens)
        with KeptActivations() as kept:
            found = run.gradients(batch, loss_tokens)
        self._kept_bytes = kept.peak_bytes
        return found

    def ledger(self, run: ModelRun, step_s: float) -> tuple[LedgerLine, ...]:
        """Predicted beside measured; `step_s`: the median step's. Empty: nothing was predicted."""
        prediction, on_gpu = self.prediction, self.device.type == "cuda"
        if prediction is None:
            return ()
        optimizer: int | None = None
        # That of 8 bits is saved wider than it is kept; that in the host's memory is no part of a GPU's.
        if self.config.optimizer.kind != "adamw8bit" and not (self.config.optimizer.offload and on_gpu):
            held = run.state()
            optimizer = sum(one.tensor.nbytes for name, one in held.items() if name.startswith("optimizer."))
        if prediction.is_least and step_s < prediction.step_s:
            self.ceiling.measure_again()  # the machine was busy when it was measured
            prediction = dataclasses.replace(prediction, step_s=self._step_flops / self.ceiling.flops)
        peak = peak_memory_bytes(self.device)
        return tuple(
            entries(prediction, step_s, run.weights_bytes(), optimizer, self._kept_bytes, peak, on_gpu)
        )


def training_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, and torch finds no GPU here; use cpu or auto")
    return device


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


# KeptActivations: counts what autograd keeps from forward to backward. The trainer measures a run's first step.
#
#     with KeptActivations() as kept:
#         run.gradients(batch, loss_tokens)
#     kept.peak_bytes
#
# Exact: every storage that some graph still needs counts once, however many tensors of it were saved; weights,
# which are there anyway, do not. What a recomputed layer makes again in backward is not kept and does not count.
@dataclass(slots=True, eq=False)
class _Saved:
    """In a graph, instead of the tensor; gone when the graph lets it go."""

    tensor: Tensor
    counted_in: "KeptActivations"

    def __del__(self) -> None:
        self.counted_in.let_go(self.tensor)


def _tensor(saved: _Saved | Tensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.tensor


class KeptActivations:
    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        # Of each storage, by its address: it cannot change while it is in use.
        self._uses: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._keep, _tensor)

    def __enter__(self) -> "KeptActivations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> _Saved | Tensor:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        address = tensor.untyped_storage().data_ptr()
        self._uses[address] = self._uses.get(address, 0) + 1
        if self._uses[address] == 1:
            self.bytes += tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return _Saved(tensor.detach(), self)  # detached: a graph that held its own output would never end

    def let_go(self, tensor: Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self.bytes -= tensor.untyped_storage().nbytes()

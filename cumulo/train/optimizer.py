"""Optimizer: which parameter is moved by what rule, and what must be saved to go on. Owned by the trainer.

AdamW is torch's fused one; Muon takes the matrices inside layers when asked. With master weights the rules move a
float32 copy and the bfloat16 parameters follow it; gradients of several micro-batches are then added in float32.
State is named after the parameters, so it can be saved, and loaded elsewhere, like them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cumulo.spec.model import ModelSpec
from cumulo.train.config import OptimizerConfig
from cumulo.train.muon import MuonMatrix, muon_step


class Optimizer:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, spec: ModelSpec, masters: bool
    ) -> None:
        self.config = config
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.moved: dict[str, Tensor] = dict(self.parameters)
        if masters:
            self.moved = {
                name: p.detach().float().requires_grad_() if p.dtype in (torch.bfloat16, torch.float16) else p
                for name, p in self.parameters.items()
            }
        by_muon = {
            name for name in self.moved if config.kind == "muon" and is_inner_matrix(name, self.moved[name])
        }
        self.matrices = {
            name: MuonMatrix(tensor, torch.zeros_like(tensor), fused_parts(name, spec, tensor))
            for name, tensor in self.moved.items()
            if name in by_muon
        }
        rest = {name: tensor for name, tensor in self.moved.items() if name not in by_muon}
        decayed = [tensor for tensor in rest.values() if tensor.ndim > 1]
        plain = [tensor for tensor in rest.values() if tensor.ndim <= 1]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if group
        ]
        self.adamw = None
        if groups:
            betas = (config.beta1, config.beta2)
            self.adamw = torch.optim.AdamW(
                groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True
            )
        # State from the start, so that what is saved and loaded is always the same set.
        self._adamw_state: dict[str, dict[str, Tensor]] = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
            for name, tensor in rest.items()
        }
        if self.adamw is not None:
            self.adamw.state.update({rest[name]: state for name, state in self._adamw_state.items()})

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take over the gradients of a micro-batch, where the rules move copies of the parameters."""
        for name, parameter in self.parameters.items():
            moved = self.moved[name]
            if moved is parameter or parameter.grad is None:
                continue
            wide = parameter.grad.to(moved.dtype)
            moved.grad = wide if moved.grad is None else moved.grad.add_(wide)
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale all gradients so that their joint norm is at most `clip_norm`; returns the norm before."""
        gradients = [tensor.grad for tensor in self.moved.values() if tensor.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(list(self.moved.values()), self.config.clip_norm, norm)
        return norm

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Move everything; `share` is the schedule's part of the learning rates."""
        config = self.config
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = config.learning_rate * share
            self.adamw.step()
        muon_step(
            list(self.matrices.values()),
            config.muon_learning_rate * share,
            config.muon_momentum,
            config.weight_decay,
        )
        for name, parameter in self.parameters.items():
            if self.moved[name] is not parameter:
                parameter.copy_(self.moved[name])

    def zero_grad(self) -> None:
        for tensor in (*self.moved.values(), *self.parameters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """The live tensors by name: saving reads them, loading writes into them."""
        found: dict[str, Tensor] = {}
        for name, slots in self._adamw_state.items():
            found |= {f"{name}.{slot}": tensor for slot, tensor in slots.items()}
        found |= {f"{name}.momentum": matrix.momentum for name, matrix in self.matrices.items()}
        for name, parameter in self.parameters.items():
            if self.moved[name] is not parameter:
                found[f"{name}.master"] = self.moved[name].detach()
        return found


def is_inner_matrix(name: str, tensor: Tensor) -> bool:
    """Embedding, head and routers are tables of vectors more than maps between spaces (Jordan 2024)."""
    return tensor.ndim >= 2 and name.startswith("layers.") and ".router." not in name


def fused_parts(name: str, spec: ModelSpec, tensor: Tensor) -> tuple[int, ...]:
    """Rows of the maps that a parameter holds."""
    if name.endswith("attention.qkv.weight"):
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return (query, key, key)
    rows = tensor.shape[-2]
    return (rows // 2, rows // 2) if "gate_up" in name and "lora" not in name else (rows,)

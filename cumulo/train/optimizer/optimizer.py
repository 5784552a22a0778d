"""Optimizer: which parameter is updated by what rule, and what must be saved to resume. Owned by the run.

AdamW is torch's fused one, or ours with 8-bit moments; Muon takes the matrices inside layers when asked. With
master weights the rules update a float32 copy and the bfloat16 parameters follow it. With `offload` that copy and
the rules' state are in the host's memory, where the rules then compute (Ren et al. 2021, ZeRO-Offload). State is
named after the parameters, so it can be saved, and loaded elsewhere, like them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.optimizer.adam8bit import Adam8bit
from cumulo.train.optimizer.muon import Muon, MuonMatrix, WholeMatrix

_LEAST_FOR_8_BITS = 4096  # elements: what is smaller costs little memory


class Optimizer:
    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimizerConfig,
        spec: ModelSpec,
        master_weights: bool,
        wholes: Mapping[str, WholeMatrix] | None = None,
    ) -> None:
        """`wholes`: of the matrices of which `parameters` has a part only, for rules that need them whole."""
        self.config = config
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.masters: dict[str, Tensor] = {
            name: _master(p, master_weights, config.offload) for name, p in self.parameters.items()
        }
        matrices: dict[str, MuonMatrix] = {}
        in_8_bits, rest = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in self.masters.items():
            if config.kind == "muon" and is_inner_matrix(name, tensor):
                whole = (wholes or {}).get(name)
                parts = fused_parts(name, spec, tensor.shape if whole is None else whole.shape)
                matrices[name] = MuonMatrix(tensor, torch.zeros_like(tensor), parts, whole)
            # Gradients of an embedding's rows are rare and large (Dettmers et al. 2021, section 2.3).
            elif (
                config.kind == "adamw8bit" and name != "embed.weight" and tensor.numel() >= _LEAST_FOR_8_BITS
            ):
                in_8_bits[name] = tensor
            else:
                rest[name] = tensor
        # How some tensors are updated by their gradients. Saving reads the tensors of a rule's `state`; loading
        # writes into them and then calls `loaded`.
        self._rules: list[_FusedAdamW | Adam8bit | Muon] = []
        if rest:
            self._rules.append(_FusedAdamW(rest, config))
        if in_8_bits:
            self._rules.append(Adam8bit(in_8_bits, config))
        if matrices:
            self._rules.append(Muon(matrices, config))

    def take_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Use these as the gradients of the whole step; a parameter without one is left as it is."""
        for name, master in self.masters.items():
            if name in gradients:
                master.grad = gradients[name].to(master.device, master.dtype)

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale all gradients so that their joint norm is at most `clip_norm`; returns the norm before."""
        norm = self.norm()
        if self.config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.config.clip_norm, norm)
        return norm

    def norm(self) -> Tensor:
        """The joint norm of all gradients."""
        gradients = [tensor.grad for tensor in self.masters.values() if tensor.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Update everything; `share` is the schedule's part of the learning rates."""
        for rule in self._rules:
            rule.step(share)
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """By `NAME.slot`: saving reads these tensors, loading writes into them and then calls `loaded`."""
        found: dict[str, Tensor] = {}
        for rule in self._rules:
            found |= rule.state()
        for name, parameter in self.parameters.items():
            if self.masters[name].dtype != parameter.dtype:
                found[f"{name}.master"] = self.masters[name].detach()
        return found

    @torch.no_grad()
    def loaded(self) -> None:
        """Parameters and `state` were overwritten: bring up to date what follows from them."""
        for rule in self._rules:
            rule.loaded()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter and self.masters[name].dtype == parameter.dtype:
                self.masters[name].copy_(parameter)


class _FusedAdamW:
    """torch's, one kernel for all tensors; matrices decay, norms and biases do not."""

    def __init__(self, tensors: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._config = config
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in (
                ([tensor for tensor in tensors.values() if tensor.ndim > 1], config.weight_decay),
                ([tensor for tensor in tensors.values() if tensor.ndim <= 1], 0.0),
            )
            if group
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        # State from the start, so that what is saved and loaded is always the same set.
        self._slots: dict[str, dict[str, Tensor]] = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }
            for name, tensor in tensors.items()
        }
        self._adamw.state.update({tensors[name]: slots for name, slots in self._slots.items()})

    def step(self, share: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self._config.learning_rate * share
        self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{slot}": tensor for name, slots in self._slots.items() for slot, tensor in slots.items()
        }

    def loaded(self) -> None:
        """They are the live tensors."""


def _master(parameter: Tensor, master_weights: bool, offload: bool) -> Tensor:
    """What the rules update for a parameter: itself, or a wider copy, or one in the host's memory."""
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half and master_weights else parameter.dtype
    if offload:
        kept = torch.empty(parameter.shape, dtype=dtype, device="cpu", pin_memory=parameter.is_cuda)
        return kept.copy_(parameter.detach()).requires_grad_()
    return parameter if dtype == parameter.dtype else parameter.detach().to(dtype).requires_grad_()


def is_inner_matrix(name: str, tensor: Tensor) -> bool:
    """Embedding, head and routers are tables of vectors more than maps between spaces (Jordan 2024)."""
    return tensor.ndim >= 2 and name.startswith("layers.") and ".router." not in name


def fused_parts(name: str, spec: ModelSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Rows of the maps that a parameter holds."""
    if name.endswith("attention.qkv.weight"):
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return (query, key, key)
    rows = shape[-2]
    return (rows // 2, rows // 2) if "gate_up" in name and "lora" not in name else (rows,)

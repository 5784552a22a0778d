"""CalibratedLayer: one decoder layer in plain float32, the inputs its matrices see on the calibration text, and its
output for the next layer. The run makes one at a time.

Matrices are addressed as Hugging Face folders name them, although the layer holds some of them fused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Layer
from cumulo.models.files import names_huggingface
from cumulo.models.files.parameter_reader import ParameterReader
from cumulo.models.files.placement import Placement
from cumulo.models.linear import TensorKind
from cumulo.models.moe import Experts
from cumulo.models.rope import RotaryTable
from cumulo.quant.decide.recipe import is_quantised

BLOCK_SIZE = 16


class _SeenEnough(Exception):
    """Raised inside a layer when all inputs of interest have been seen: the rest need not be computed."""


@dataclass(slots=True)
class Inputs:
    """What is known of the inputs of a matrix: X Xᵀ, mean and largest size, over all tokens so far."""

    hessian: Tensor  # [columns, columns]
    total: Tensor  # [columns], of absolute values
    largest: float = 0.0
    tokens: int = 0

    @classmethod
    def empty(cls, columns: int) -> "Inputs":
        return cls(torch.zeros(columns, columns), torch.zeros(columns))

    def add(self, x: Tensor) -> None:
        x = x.float()
        self.hessian.addmm_(x.T, x)
        sizes = x.abs()
        self.total += sizes.sum(0)
        self.largest = max(self.largest, float(sizes.max())) if len(x) else self.largest
        self.tokens += len(x)

    @property
    def mean(self) -> Tensor:
        return self.total / max(1, self.tokens)


class CalibratedLayer:
    def __init__(self, reader: ParameterReader, index: int) -> None:
        self.spec, self.index = reader.spec, index
        self.module = Layer(self.spec, index, kind=TensorKind(torch.float32, "cpu"))
        self.module.attention.layer = 0  # of a cache that holds this layer alone
        self.parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(reader.read(f"layers.{index}.{name}"))
        self.placements = [
            replace(one, target=one.target.removeprefix(f"layers.{index}."))
            for one in names_huggingface.placements(self.spec)
            if one.target.startswith(f"layers.{index}.")
        ]
        self._rotary = RotaryTable(self.spec, torch.float32)

    def matrices(self) -> Iterator[tuple[str, Placement]]:
        """Every matrix to quantise: its module's name and its place."""
        for placement in self.placements:
            module = placement.source.removesuffix(".weight")
            if module != placement.source and is_quantised(module):
                yield module, placement

    def weight(self, placement: Placement) -> Tensor:
        """A view of the matrix inside the parameter that holds it."""
        return placement.region(self.parameters[placement.target].data)

    def site(self, placement: Placement) -> str:
        """Where the inputs of a matrix are seen: matrices that are fused see the same."""
        expert = f".{placement.offset[0]}" if len(placement.offset) > len(placement.shape) else ""
        return placement.target.removesuffix(".weight") + expert

    # -- forward ---------------------------------------------------------------------------------------
    @torch.inference_mode()
    def run(self, hidden: Tensor, into: Tensor | None = None) -> None:
        """The layer over all sequences [S, T, hidden]; results go to `into`, if that is given."""
        sequences, tokens, _ = hidden.shape
        cache = KVCache(replace(self.spec, layers=1), -(-tokens // BLOCK_SIZE), BLOCK_SIZE)
        batch = text_batch(torch.arange(tokens))
        rotation = self._rotary.rotation_at(batch.positions)
        for sequence in range(sequences):
            try:
                result = self.module(hidden[sequence], rotation, batch, cache)
            except _SeenEnough:
                continue
            if into is not None:
                into[sequence] = result

    @contextmanager
    def watching(self, sites: Mapping[str, Inputs], stop_after: str | None = None) -> Iterator[None]:
        """Collect the inputs of `sites` while the layer runs, and stop at the site `stop_after`."""
        undo: list[Callable[[], Any]] = []
        for name, module in self.module.named_modules():
            if isinstance(module, Experts):
                undo.append(_watch_experts(module, name, sites))
            elif name in sites:
                undo.append(_watch(module, sites[name], name == stop_after))
        try:
            yield
        finally:
            for one in undo:
                one()


def _watch(module: nn.Module, inputs: Inputs, stop: bool) -> Callable[[], Any]:
    def seen(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.add(arguments[0])
        if stop:
            raise _SeenEnough

    return module.register_forward_pre_hook(seen).remove


def _watch_experts(experts: Experts, name: str, sites: Mapping[str, Inputs]) -> Callable[[], Any]:
    plain = experts.matmul

    def matmul(which: str, expert: int, x: Tensor) -> Tensor:
        inputs = sites.get(f"{name}.{which}.{expert}")
        if inputs is not None:
            inputs.add(x)
        return plain(which, expert, x)

    experts.__dict__["matmul"] = matmul
    return lambda: experts.__dict__.pop("matmul")


def text_batch(token_ids: Tensor) -> ForwardBatch:
    """A text as one prompt, with a cache of its own from the first block on."""
    tokens = len(token_ids)
    positions, blocks = torch.arange(tokens), -(-tokens // BLOCK_SIZE)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=positions,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lengths=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        logit_rows=positions,
    )

"""Recompute: which results of forward are computed again in backward instead of being kept. The layers of
`TrainingDecoder` ask it.

Whole layers, which keeps only their inputs (Chen et al. 2016), or single operations that hold much memory for
little arithmetic (Korthikanti et al. 2022, section 5):

- "norm": the normed input of a block's first product; with sequence parallelism also its gathering.
- "activation": what the gate lets through, the input of a feed-forward's second product.
- "attention": rotated queries and keys, and attention's result.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch.utils.checkpoint import checkpoint

from cumulo.errors import ConfigError

Operation = Literal["norm", "activation", "attention"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Recompute:
    layers: bool = False
    operations: frozenset[Operation] = frozenset()

    @classmethod
    def from_option(cls, asked: bool | Collection[str]) -> "Recompute":
        if isinstance(asked, bool):
            return cls(layers=asked)
        known: tuple[Operation, ...] = get_args(Operation)
        if unknown := [name for name in asked if name not in known]:
            raise ConfigError(
                f"recompute knows no operation {', '.join(unknown)}; name some of {', '.join(known)}, or say true "
                "for whole layers"
            )
        return cls(operations=frozenset(name for name in known if name in asked))

    def layer(self, function: Callable[..., Result], *arguments: object) -> Result:
        return _again(function, *arguments) if self.layers else function(*arguments)

    def operation(self, name: Operation, function: Callable[..., Result], *arguments: object) -> Result:
        """`function` ends with a product that keeps its input: torch stops computing again before that product."""
        return _again(function, *arguments) if name in self.operations else function(*arguments)


def _again(function: Callable[..., Result], *arguments: object) -> Result:
    if not torch.is_grad_enabled():
        return function(*arguments)
    result: Result = checkpoint(function, *arguments, use_reentrant=False)
    return result

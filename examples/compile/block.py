"""A feed-forward block for `cumulo compile model examples/compile/block.py:Block`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(256))
        self.gate = nn.Linear(256, 1024, bias=False)
        self.up = nn.Linear(256, 1024, bias=False)
        self.down = nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(512, 256),)

"""How often does rounding alone change the next greedy token of a random model in bfloat16? On a CPU, in a minute:

    python benchmarks/rank_rounding.py

The same tokens go through the same weights with products that are added up in different ways: as one rank does, in
other orders, and as the sum of two ranks. Matrices hold bfloat16; products add up in float32 and are rounded where
the GPU's kernels round. Shown is the share of positions at which the most likely token is the one of the first way.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Way:
    name: str
    parts: int = 1  # of k, added one after the other
    ranks: int = 1  # parts that are rounded to `partial` and then added
    partial: torch.dtype = torch.float32


WAYS = (
    Way("one rank"),
    Way("one rank, products added up in 4 pieces", parts=4),
    Way("two ranks, partial sums in float32", ranks=2),
    Way("two ranks, partial sums in bfloat16", ranks=2, partial=torch.bfloat16),
)


def rounded(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype).float()


def product(x: Tensor, weight: Tensor, way: Way) -> Tensor:
    total = torch.zeros(())
    for own, rows in zip(x.chunk(way.ranks, -1), weight.chunk(way.ranks, -1), strict=True):
        pieces = zip(own.chunk(way.parts, -1), rows.chunk(way.parts, -1), strict=True)
        total = total + rounded(sum((a @ b.t() for a, b in pieces), torch.zeros(())), way.partial)
    return total


def norm(x: Tensor) -> Tensor:
    return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class RandomModel:
    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, seed: int = 0) -> None:
        generator, self.heads = torch.Generator().manual_seed(seed), heads

        def matrix(rows: int, columns: int) -> Tensor:
            return rounded(torch.randn(rows, columns, generator=generator) * columns**-0.5)

        self.embed, self.head = matrix(vocabulary, hidden), matrix(vocabulary, hidden)
        shapes = ((3, 1), (1, 1), (6, 1), (1, 3))  # qkv, output, gate and up, down
        self.layers = [
            [matrix(rows * hidden, columns * hidden) for rows, columns in shapes] for _ in range(layers)
        ]

    def likeliest(self, tokens: Tensor, way: Way) -> Tensor:
        """Of every position of [sequences, length]. Ranks divide the sums of two products of a layer only."""
        whole = Way("", parts=way.parts)
        x = self.embed[tokens]
        for qkv, output, gate_up, down in self.layers:
            mixed = self._attend(rounded(product(norm(x), qkv, whole)))
            x = rounded(x + product(mixed, output, way))
            gate, up = rounded(product(norm(x), gate_up, whole)).chunk(2, -1)
            x = rounded(x + product(rounded(torch.nn.functional.silu(gate) * up), down, way))
        return rounded(product(norm(x), self.head, whole)).argmax(-1)

    def _attend(self, qkv: Tensor) -> Tensor:
        sequences, length, columns = qkv.shape
        q, k, v = (
            one.view(sequences, length, self.heads, -1).transpose(1, 2) for one in qkv.split(columns // 3, -1)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return rounded(mixed.transpose(1, 2).reshape(sequences, length, -1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=32)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, chosen.vocabulary, (chosen.sequences, 64), generator=generator)
    for layers in (1, 4, 28):
        model = RandomModel(layers, chosen.hidden, chosen.hidden // 64, chosen.vocabulary)
        first, *others = (model.likeliest(tokens, way) for way in WAYS)
        for way, found in zip(WAYS[1:], others, strict=True):
            print(
                f"{layers:2} layers, {way.name:42} {100 * float((found == first).float().mean()):6.2f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()

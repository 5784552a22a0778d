"""Layers in 4 bits as a chain of kernels in a CUDA graph, of models of 0.6 to 70 billion weights: microseconds a
layer as `linear` chooses its kernels, and with `w4` for every product.

    python benchmarks/gpu_w4_chain.py [--models Qwen2.5-7B] [--rows 1,4]

Weights are random, shapes are real; a chain has enough layers that no weight is in the cache when its turn comes.
Rows are lanes of one sequence of 256 positions.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import gpu_few_rows_chain as chains
from gpu_few_rows_chain import Chain, Shape

from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear.linear import linear
from cumulo.kernels.cuda.linear.w4 import w4_linear
from cumulo.kernels.cuda.linear.w4_weight import W4Weight

SHAPES = {
    "Llama-3.1-8B": Shape(4096, 32, 8, 128, 14336, 16),
    "Qwen2.5-7B": Shape(3584, 28, 4, 128, 18944, 14),
    "Llama-3.2-3B": Shape(3072, 24, 8, 128, 8192, 16),
    "Qwen3-0.6B": Shape(1024, 16, 8, 128, 3072, 28, normed_heads=True),
    "Llama-3.1-70B": Shape(8192, 64, 8, 128, 28672, 6),
}


def chain_in_4_bits(shape: Shape, m: int) -> Chain:
    chain = Chain(shape, m, layers=1)
    first = {name: W4Weight.quantised(weight) for name, weight in chain.weights[0].items()}
    copies = [{name: _copy(weight) for name, weight in first.items()} for _ in range(shape.layers - 1)]
    chain.weights = [first, *copies]  # type: ignore[list-item]
    chain.norms = chain.norms * shape.layers
    chain.keys = [chain.keys[0].clone() for _ in range(shape.layers)]
    chain.values = [chain.values[0].clone() for _ in range(shape.layers)]
    return chain


def _copy(weight: W4Weight) -> W4Weight:
    return W4Weight(weight.words.clone(), weight.scales.clone(), None, weight.group)


def by_w4(x: Tensor, weight: W4Weight, out: Tensor, rotation: object = None, **more: Any) -> Tensor:
    assert rotation is None
    return w4_linear(x, weight, out, **more)


def layer_us(chain: Chain, rounds: int = 7) -> tuple[float, Tensor]:
    """Microseconds a layer, and what the chain computed."""
    captured = chain.captured(None)
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            captured.graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 4 / chain.shape.layers)
    return median(times), captured.stream


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4", help="of activations, with commas")
    chosen = parser.parse_args()
    registry.load_for(registry.device_name(torch.device("cuda", 0)))
    door.prepare("cuda")
    rotates = door.rotates
    for name in chosen.models.split(","):
        for m in map(int, chosen.rows.split(",")):
            chain = chain_in_4_bits(SHAPES[name], m)
            chains.linear, door.rotates = by_w4, lambda *_: False  # type: ignore[assignment]
            before, plain = layer_us(chain)
            chains.linear, door.rotates = linear, rotates
            now, got = layer_us(chain)
            apart = float((got.float() - plain.float()).norm() / plain.float().norm())
            print(f"{name:14} m={m}: w4 {before:6.1f} us a layer, as chosen {now:6.1f} ({now / before:.2f}); the "
                  f"streams differ by {apart:.4f}", flush=True)  # fmt: skip
            del chain


if __name__ == "__main__":
    main()

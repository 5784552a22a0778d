"""One decoder layer through eager PyTorch, backend="cumulo" and Inductor, forward and backward: prints the ratios.

    python benchmarks/compile_layer.py [--tokens 4096] [--hidden 4096] [--device cuda]

Needs torch, numpy and Triton. The layer is that of Llama 3 8B (grouped-query attention, SwiGLU), with random
weights. The three take turns, so that a warm or busy device favours none.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from cumulo.compile.passes import compiler

KV_SHARE, HEAD_DIM = 4, 128


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Llama's layer: grouped-query attention with rotary positions, SwiGLU, two RMSNorms."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_DIM
        self.kv_heads = max(1, self.heads // KV_SHARE)
        kv = self.kv_heads * HEAD_DIM
        self.query, self.out = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = nn.Linear(hidden, kv, bias=False), nn.Linear(hidden, kv, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.first, self.second = Norm(hidden), Norm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.first(x)
        query, key, value = (
            project(normed).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def timed(runs: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            wait(device)
            begun = time.perf_counter()
            for _ in range(5):
                run()
            wait(device)
            took[name].append((time.perf_counter() - begun) / 5)
    return {name: statistics.median(times) for name, times in took.items()}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = Layer(given.hidden, given.ffn).to(given.device, dtype)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, hidden {given.hidden}, {dtype}")
    for tokens in given.tokens:
        x = torch.randn(1, tokens, given.hidden, device=given.device, dtype=dtype)
        angles = torch.outer(
            torch.arange(tokens, device=given.device), 1e-2 ** torch.arange(0, 1, 1 / 64, device=given.device)
        )
        cos, sin = (torch.cat((one, one), -1).to(dtype) for one in (angles.cos(), angles.sin()))
        weight = torch.randn_like(x)
        for training in (False, True):
            torch._dynamo.reset()
            models: dict[str, Callable[..., Tensor]] = {"eager": layer}
            with compiler.recording() as reports:
                models["cumulo"] = torch.compile(layer, backend=compiler.cumulo)
                run_once(models["cumulo"], x, cos, sin, weight, training)
            models["inductor"] = torch.compile(layer)
            found = {name: run_once(model, x, cos, sin, weight, training) for name, model in models.items()}
            runs: dict[str, Callable[[], object]] = {
                name: partial(run_once, model, x, cos, sin, weight, training)
                for name, model in models.items()
            }
            took = timed(runs, given.device, given.rounds)
            worst = max(
                float((one.float() - other.float()).abs().max() / other.float().abs().max())
                for one, other in zip(found["cumulo"], found["eager"], strict=True)
            )
            what = "forward and backward" if training else "forward"
            print(f"{tokens} tokens, {what}:")
            for name, seconds in took.items():
                print(
                    f"  {name:<9} {seconds * 1e3:9.3f} ms   {took['inductor'] / seconds:.2f} of Inductor's speed"
                )
            print(f"  largest difference from eager {worst:.1e}")
            for report in reports:
                print(f"  {report.summary}")


def run_once(
    model: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, training: bool
) -> list[Tensor]:
    if not training:
        with torch.no_grad():
            return [model(x, cos, sin)]
    given = x.detach().requires_grad_()
    out = model(given, cos, sin)
    module = getattr(model, "_orig_mod", model)
    return [out.detach(), *torch.autograd.grad(out, [given, *module.parameters()], weight)]


if __name__ == "__main__":
    main()

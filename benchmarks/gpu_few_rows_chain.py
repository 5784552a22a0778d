"""The layers of a small model as a chain of kernels, as gpu_few_rows.py times them: shapes, random weights, what
could compute each part of a layer, and a graph of all layers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cumulo.kernels.cuda.attention.config import decode_config, decode_key  # noqa: E402
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan, attention_plan  # noqa: E402
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig  # noqa: E402
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache  # noqa: E402
from cumulo.kernels.cuda.linear import few_dot, few_linear  # noqa: E402
from cumulo.kernels.cuda.linear import linear as door  # noqa: E402
from cumulo.kernels.cuda.linear.linear import Choice, linear  # noqa: E402
from cumulo.kernels.cuda.linear.rotation import PagedRotation  # noqa: E402
from cumulo.kernels.cuda.linear.small_linear import random_bf16  # noqa: E402

CONTEXT, BLOCK, MOST_BLOCKS = 256, 64, 32  # positions of a sequence, and what its engine has room for
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    layers: int
    normed_heads: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


MODELS = {
    "SmolLM2-135M": Shape(576, 9, 3, 64, 1536, 30),
    "SmolLM2-360M": Shape(960, 15, 5, 64, 2560, 16),
    "Qwen3-0.6B": Shape(1024, 16, 8, 128, 3072, 14, normed_heads=True),
}
PARTS = ("rotated qkv", "attention", "qkv", "o", "gate/up", "down")


@dataclass(frozen=True, slots=True)
class Part:
    """A product of a layer: its matrix and what comes with it."""

    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False


def parts(shape: Shape) -> dict[str, Part]:
    return {
        "qkv": Part(shape.qkv, shape.hidden, norm=True),
        "o": Part(shape.hidden, shape.heads * shape.dim, residual=True),
        "gate/up": Part(2 * shape.ffn, shape.hidden, norm=True, swiglu=True),
        "down": Part(shape.hidden, shape.ffn, residual=True),
    }


def key(shape: Shape, part: str, m: int) -> str:
    """In the table of winners."""
    if part == "attention":
        group, processors = shape.heads // shape.kv_heads, 132
        return decode_key(group, shape.dim, torch.bfloat16, m * shape.kv_heads, processors)
    own = parts(shape)[part.removeprefix("rotated ")]
    plain = door.shape_key(m, own.n, own.k, "bf16", own.swiglu)
    return f"{plain} rotated" if part == "rotated qkv" else plain


def choices(shape: Shape, part: str, m: int) -> list[Choice | DecodeConfig | None]:
    """Everything worth timing for a part, today's first; None: the rotation is a kernel of its own."""
    if part == "attention":
        pairs = m * shape.kv_heads
        today = decode_config(shape.heads // shape.kv_heads, shape.dim, torch.bfloat16, pairs, 132, False)
        changes = (
            {"min_tiles": 2}, {"min_tiles": 4}, {"min_tiles": 8}, {"num_warps": 1}, {"num_warps": 2},
            {"num_warps": 8}, {"items_per_sm": 1}, {"key_tile": 32}, {"num_stages": 2},
            {"items_per_sm": 1, "num_warps": 2}, {"min_tiles": 2, "num_warps": 2},
            {"min_tiles": 4, "num_warps": 2}, {"min_tiles": 4, "items_per_sm": 1},
        )  # fmt: skip
        return list(dict.fromkeys([today, *(replace(today, **change) for change in changes)]))
    own = parts(shape)[part.removeprefix("rotated ")]
    dots: list[Choice | DecodeConfig | None] = []
    rotated = part == "rotated qkv"
    for config in few_dot.candidates(m, own.n, own.k, own.swiglu or rotated):
        if not rotated or config.rows <= shape.dim:
            dots.append(Choice("dot", config))
    if rotated:
        today_rotated = door.WINNERS.get(key(shape, part, m))
        return [] if shape.normed_heads else list(dict.fromkeys([today_rotated, None, *dots]))
    today_choice = _today(m, own)
    found: list[Choice | DecodeConfig | None] = [today_choice]
    if own.n * own.k <= few_linear.SMALL_MATRIX:
        few = few_linear.default_config(m, own.n, own.k, own.swiglu)
        found += [Choice("few", replace(few, waits_first=first)) for first in (False, True)]
    return list(dict.fromkeys([*found, *dots]))


def _today(m: int, part: Part) -> Choice:
    """Who computes it now, with its configuration spelled out."""
    chosen = door.choose(m, torch.empty(part.n, part.k, dtype=torch.bfloat16, device="meta"), part.swiglu)
    if chosen.kernel == "few" and chosen.config is None:
        return Choice("few", few_linear.default_config(m, part.n, part.k, part.swiglu))
    return chosen


class Chain:
    """All layers' kernels of a step of m rows, which are lanes of one sequence."""

    def __init__(self, shape: Shape, m: int, layers: int, device: str = "cuda") -> None:
        self.shape, self.m = shape, m
        generator = torch.Generator(device).manual_seed(m)

        def random(*sizes: int, std: float = 1.0) -> Tensor:
            return random_bf16(*sizes, device=device, generator=generator, std=std)

        self.weights = [
            {name: random(part.n, part.k, std=part.k**-0.5) for name, part in parts(shape).items()}
            for _ in range(layers)
        ]
        self.norms = [
            (1 + random(shape.hidden, std=0.1), 1 + random(shape.hidden, std=0.1)) for _ in range(layers)
        ]
        heads = [1 + random(shape.dim, std=0.1) if shape.normed_heads else None for _ in range(2)]
        self.q_norm, self.k_norm = heads
        sizes = (MOST_BLOCKS, shape.kv_heads, BLOCK, shape.dim)
        self.keys, self.values = ([random(*sizes) for _ in range(layers)] for _ in range(2))
        self.start = random(m, shape.hidden)
        self.stream = torch.empty_like(self.start)
        self.qkv = random(m, shape.qkv)
        self.mixed = random(m, shape.heads * shape.dim)
        self.activated = random(m, shape.ffn)
        angles = torch.arange(2048, device=device)[:, None] * (
            1e-4 ** (torch.arange(shape.dim // 2, device=device) / (shape.dim // 2))
        )
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        last = CONTEXT - m
        self.positions = ints(range(last, last + m))
        self.slots = ints(range(last, last + m))  # block i of the table is block i
        self.tables = ints(range(MOST_BLOCKS)).repeat(m, 1)
        self.starts, self.contexts = ints(range(m + 1)), self.positions + 1
        self.scale = shape.dim**-0.5

    def plan(self, decode: DecodeConfig | None) -> AttentionPlan:
        shape, m = self.shape, self.m
        return attention_plan(
            m, m, shape.heads, shape.kv_heads, shape.dim, BLOCK, MOST_BLOCKS, decode_only=True, invariant=False,
            device=self.stream.device, decode=decode,
        )  # fmt: skip

    def run(self, plan: AttentionPlan, behind: Callable[[], object] = lambda: None) -> None:
        """`behind`: called behind each kernel."""
        shape, m = self.shape, self.m
        plan.prepare(self.starts, self.contexts, self.tables)
        self.stream.copy_(self.start)
        query = self.qkv.view(m, -1, shape.dim)[:, : shape.heads]
        for layer, (weights, norms) in enumerate(zip(self.weights, self.norms, strict=True)):
            keys, values = self.keys[layer], self.values[layer]
            rotation = PagedRotation(
                self.cos, self.sin, self.positions, self.slots, keys, values, shape.heads
            )
            at_once = not shape.normed_heads and door.rotates(m, weights["qkv"], self.stream.dtype)
            linear(
                self.stream, weights["qkv"], self.qkv, norm_weight=norms[0], eps=EPS,
                rotation=rotation if at_once else None,
            )  # fmt: skip
            behind()
            if not at_once:
                rope_cache(
                    self.qkv, self.cos, self.sin, self.positions, self.slots, keys, values, shape.heads,
                    self.q_norm, self.k_norm, EPS,
                )  # fmt: skip
                behind()
            plan.attend(query, keys, values, self.mixed.view(m, shape.heads, shape.dim), self.scale)
            behind()
            linear(self.mixed, weights["o"], self.stream, residual=self.stream)
            behind()
            linear(
                self.stream, weights["gate/up"], self.activated, norm_weight=norms[1], eps=EPS, swiglu=True
            )
            behind()
            linear(self.activated, weights["down"], self.stream, residual=self.stream)
            behind()

    def captured(self, decode: DecodeConfig | None) -> "Captured":
        plan = self.plan(decode)
        self.run(plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(plan)
        graph.replay()
        torch.cuda.synchronize()
        return Captured(graph, plan, self.stream.clone())


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    plan: AttentionPlan  # kept as long as the graph that uses it
    stream: Tensor  # what it computed


Setting = dict[str, Choice | DecodeConfig | None]


@contextmanager
def using(shape: Shape, m: int, setting: Setting) -> Iterator[DecodeConfig | None]:
    """The table of winners with these choices, by part."""
    kept = dict(door.WINNERS)
    decode = None
    for part, choice in setting.items():
        if isinstance(choice, DecodeConfig):
            decode = choice
        elif choice is None:
            door.WINNERS.pop(key(shape, part, m), None)
        else:
            door.WINNERS[key(shape, part, m)] = choice
    try:
        yield decode
    finally:
        door.WINNERS.clear()
        door.WINNERS.update(kept)

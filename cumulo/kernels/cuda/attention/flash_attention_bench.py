"""Dense attention timed: benchmark rows for `cumulo bench kernels`, and `tune`, which finds tile sizes and winners.

`python -m cumulo.kernels.cuda.attention.flash_attention_bench TABLE.json` on the device writes what
`load_winners` reads.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from cumulo.kernels.cuda.attention import flash_attention as door
from cumulo.kernels.cuda.attention.flash_attention_backward import (
    BackwardConfig,
    default_backward,
    launch_backward,
)
from cumulo.kernels.cuda.attention.flash_attention_forward import (
    ForwardConfig,
    default_forward,
    launch_forward,
)
from cumulo.kernels.cuda.timing import eager_us
from cumulo.kernels.cuda.work import KernelRow

Config = TypeVar("Config", ForwardConfig, BackwardConfig)

FORWARD = [
    ForwardConfig(128, 128, 8, 2, descriptors=False),
    ForwardConfig(128, 128, 8, 2, descriptors=True),
    ForwardConfig(128, 64, 8, 2, descriptors=True),
    ForwardConfig(128, 64, 8, 3, descriptors=True),
    ForwardConfig(128, 64, 8, 3, descriptors=False),
    ForwardConfig(128, 64, 8, 2, descriptors=True, maxnreg=128),
    ForwardConfig(64, 64, 4, 3, descriptors=True),
    ForwardConfig(64, 64, 4, 3, descriptors=False),
]
FOR_KEYS = [
    BackwardConfig(128, 64, 8, 2),
    BackwardConfig(64, 64, 4, 2),
    BackwardConfig(64, 64, 8, 2),
    BackwardConfig(128, 64, 8, 1, descriptors=False),
]
FOR_QUERIES = [BackwardConfig(128, 64, 8, 2), BackwardConfig(128, 64, 8, 3), BackwardConfig(64, 64, 4, 2)]

CHECKED = [300, 1, 512, 211]  # lengths of documents on which every candidate is checked first
HEADS = {128: (16, 16), 64: (32, 8)}  # what training shapes have; 16 heads of 128 as in the anchors
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # classes whose winner is asked for
MAX_ERROR = 2e-2


class Case:
    """One batch of packed documents on the device, in bfloat16 unless said."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        tokens = sum(lengths)
        self.lengths, self.heads, self.kv_heads, self.dim = lengths, heads, kv_heads, dim
        self.query, self.key, self.value, self.grad_out = (
            torch.randn((tokens, h, dim), device=device, dtype=dtype, generator=generator)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        self.scale = dim**-0.5
        self.out = torch.full_like(self.query, float("nan"))
        self.lse = torch.empty((heads, tokens), device=device)
        self.grads = tuple(torch.full_like(x, float("nan")) for x in (self.query, self.key, self.value))

    def forward(self, config: ForwardConfig) -> None:
        launch_forward(
            self.query, self.key, self.value, self.starts, self.starts, True, self.scale, self.out, self.lse, config
        )  # fmt: skip

    def backward(self, for_keys: BackwardConfig, for_queries: BackwardConfig) -> None:
        launch_backward(
            self.query, self.key, self.value, self.out, self.lse, self.grad_out, None, self.starts, self.starts,
            True, self.scale, (self.grads[0], self.grads[1], self.grads[2]), for_keys, for_queries,
        )  # fmt: skip

    def exact(self) -> list[Tensor]:
        """Output and the three gradients, in float32."""
        leaves = [x.float().requires_grad_() for x in (self.query, self.key, self.value)]
        q, k, v = leaves
        out, _ = door.reference(q, k, v, self.starts, self.starts, True, self.scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad_out.float())]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


# -- rows -----------------------------------------------------------------------------------------------------
def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """Causal attention of one long sequence, forward and backward, and of many packed documents."""
    for dim, length in ((128, 2048), (128, 8192), (128, 16384), (64, 4096), (64, 16384)):
        yield from _equal_rows(max(1, 16384 // length), length, *HEADS[dim], dim, device)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(64, 2048, (16,), generator=generator).tolist()
    for dim in (128, 64):
        yield from _packed_rows(lengths, *HEADS[dim], dim, device)


def _equal_rows(
    batch: int, length: int, heads: int, kv_heads: int, dim: int, device: torch.device | str
) -> Iterator[KernelRow]:
    case = Case([length] * batch, heads, kv_heads, dim, device)
    shape = f"B={batch} S={length} {heads}/{kv_heads} heads d={dim} causal"
    forward, backward = door.forward_config(case.query), door.backward_config(case.query)
    forward_error, backward_error = _errors(heads, kv_heads, dim, device)
    rivals = {name: _rival_us(name, case, batch) for name in ("cudnn", "flash")}
    goal = (dim, length) == (128, 16384)
    cost = door.work(case.lengths, heads, kv_heads, dim)
    yield KernelRow(
        "flash_attention", shape, cost, eager_us(lambda: case.forward(forward)),
        {name: us[0] for name, us in rivals.items() if us}, config=str(forward), error=forward_error,
        must_us=cost.flops / 450e6 if goal else None, aim_us=cost.flops / 600e6 if goal else None,
    )  # fmt: skip
    yield KernelRow(
        "flash_attention backward", shape, door.work(case.lengths, heads, kv_heads, dim, backward=True),
        eager_us(lambda: case.backward(*backward)), {name: us[1] for name, us in rivals.items() if us},
        config=str(backward), error=backward_error,
    )  # fmt: skip


def _errors(heads: int, kv_heads: int, dim: int, device: torch.device | str) -> tuple[float, float]:
    """Of the configurations in use, on documents small enough for the reference."""
    case = Case(CHECKED, heads, kv_heads, dim, device)
    exact = case.exact()
    case.forward(door.forward_config(case.query))
    case.backward(*door.backward_config(case.query))
    worst = max(relative_error(grad, right) for grad, right in zip(case.grads, exact[1:], strict=True))
    return relative_error(case.out, exact[0]), worst


def _rival_us(name: str, case: Case, batch: int) -> tuple[float, float] | None:
    """Forward and backward of torch's; None where it does not take the shape."""
    leaves = [
        x.view(batch, -1, *x.shape[1:]).detach().requires_grad_() for x in (case.query, case.key, case.value)
    ]
    upstream = case.grad_out.view(batch, -1, *case.grad_out.shape[1:])
    try:
        with torch.no_grad():
            forward = eager_us(lambda: door.attention_by(name, *leaves))
        out = door.attention_by(name, *leaves)
        return forward, eager_us(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True))
    except RuntimeError:
        return None


def _packed_rows(
    lengths: list[int], heads: int, kv_heads: int, dim: int, device: torch.device | str
) -> Iterator[KernelRow]:
    case = Case(lengths, heads, kv_heads, dim, device)
    shape = f"{len(lengths)} documents of 64 to 2048, {heads}/{kv_heads} heads d={dim} causal"
    forward, backward = door.forward_config(case.query), door.backward_config(case.query)
    exact = case.exact()
    us = eager_us(lambda: case.forward(forward)), eager_us(lambda: case.backward(*backward))
    worst = max(relative_error(grad, right) for grad, right in zip(case.grads, exact[1:], strict=True))
    rival = _torch_packed_us(case)
    yield KernelRow(
        "packed_attention", shape, door.work(lengths, heads, kv_heads, dim), us[0],
        {"torch varlen_attn": rival[0]} if rival else {}, config=str(forward),
        error=relative_error(case.out, exact[0]),
    )  # fmt: skip
    yield KernelRow(
        "packed_attention backward", shape, door.work(lengths, heads, kv_heads, dim, backward=True), us[1],
        {"torch varlen_attn": rival[1]} if rival else {}, config=str(backward), error=worst,
    )  # fmt: skip


def _torch_packed_us(case: Case) -> tuple[float, float] | None:
    """torch's own attention over packed documents, where this torch has it and takes the shape."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        group, longest = case.heads // case.kv_heads, max(case.lengths)
        leaves = [
            x.detach().requires_grad_()
            for x in (
                case.query,
                case.key.repeat_interleave(group, 1),
                case.value.repeat_interleave(group, 1),
            )
        ]

        lengths: tuple[Any, ...] = (case.starts, case.starts, longest, longest)
        # How a causal mask is asked for differs by version.
        newer = "window_size" in signature(varlen_attn).parameters
        causal: dict[str, Any] = {"window_size": (-1, 0)} if newer else {"is_causal": True}

        def attend() -> Any:
            return varlen_attn(leaves[0], leaves[1], leaves[2], *lengths, **causal)

        with torch.no_grad():
            forward = eager_us(attend)
        out = attend()
        return forward, eager_us(lambda: torch.autograd.grad(out, leaves, case.grad_out, retain_graph=True))
    except (ImportError, RuntimeError, TypeError):
        return None


# -- tuning ---------------------------------------------------------------------------------------------------
def tune(device: torch.device | str = "cuda", threads: int = 12) -> dict[str, str]:
    """Time every candidate, keep the best in flash_attention's tables, then ask who wins; prints it all."""
    for dim, (heads, kv_heads) in HEADS.items():
        small, large = Case(CHECKED, heads, kv_heads, dim, device), Case([8192], heads, kv_heads, dim, device)
        exact = small.exact()
        small.forward(default_forward(dim, torch.bfloat16))
        keys_default, queries_default = default_backward(dim, torch.bfloat16)

        def forward_error(config: ForwardConfig, small: Case = small, exact: list[Tensor] = exact) -> float:
            small.out.fill_(float("nan"))
            small.forward(config)
            return relative_error(small.out, exact[0])

        def backward_error(
            for_keys: BackwardConfig,
            for_queries: BackwardConfig,
            small: Case = small,
            exact: list[Tensor] = exact,
        ) -> float:
            for grad in small.grads:
                grad.fill_(float("nan"))
            small.backward(for_keys, for_queries)
            return max(
                relative_error(grad, right) for grad, right in zip(small.grads, exact[1:], strict=True)
            )

        with ThreadPoolExecutor(threads) as pool:  # compiles: errors and results are looked at below
            jobs = [pool.submit(small.forward, config) for config in FORWARD]
            jobs += [pool.submit(small.backward, config, queries_default) for config in FOR_KEYS]
            jobs += [pool.submit(small.backward, keys_default, config) for config in FOR_QUERIES]
            for job in jobs:
                job.exception()
        torch.cuda.synchronize()
        best = _best(f"forward d={dim}", FORWARD, forward_error, large.forward)
        small.forward(best)
        large.forward(best)
        keys = _best(
            f"backward of keys d={dim}", FOR_KEYS, lambda c, q=queries_default, e=backward_error: e(c, q),  # type: ignore[misc]
            lambda c, q=queries_default, run=large.backward: run(c, q),  # type: ignore[misc]
        )  # fmt: skip
        queries = _best(
            f"backward of queries d={dim}", FOR_QUERIES, lambda c, k=keys, e=backward_error: e(k, c),  # type: ignore[misc]
            lambda c, k=keys, run=large.backward: run(k, c),  # type: ignore[misc]
        )  # fmt: skip
        door.FORWARD[f"d{dim}"], door.BACKWARD[f"d{dim}"] = best, (keys, queries)
    _find_winners(device)
    return door.WINNERS


def _best(
    what: str,
    candidates: Sequence[Config],
    error_of: Callable[[Config], float],
    run: Callable[[Config], None],
) -> Config:
    """The fastest of the candidates that the device takes and that are right."""
    times: dict[Config, float] = {}
    for config in candidates:
        try:
            error = error_of(config)
            if not error < MAX_ERROR:
                print(f"   {config} is wrong by {error:.3g}", flush=True)
                continue
            times[config] = eager_us(partial(run, config), 5)
        except Exception as error:  # too much shared memory, and the like
            print(f"   {config}: {type(error).__name__}", flush=True)
            torch.cuda.synchronize()
    best = min(times, key=lambda config: times[config])
    print(what)
    for config, us in times.items():
        print(f" {'*' if config == best else ' '} {us:9.1f} us  {config}", flush=True)
    return best


def _find_winners(device: torch.device | str) -> None:
    for dim, (heads, kv_heads) in HEADS.items():
        for length in LENGTHS:
            batch = max(1, LENGTHS[-1] // length)
            case = Case([length] * batch, heads, kv_heads, dim, device)
            leaves = [
                x.view(batch, length, -1, dim).detach().requires_grad_()
                for x in (case.query, case.key, case.value)
            ]
            upstream = case.grad_out.view(batch, length, heads, dim)
            for training in (False, True):
                times = {}
                for name in ("ours", "cudnn", "flash"):

                    def once(
                        name: str = name,
                        training: bool = training,
                        leaves: list[Tensor] = leaves,
                        upstream: Tensor = upstream,
                    ) -> None:
                        with torch.set_grad_enabled(training):
                            out = door.attention_by(name, *leaves)
                        if training:
                            torch.autograd.grad(out, leaves, upstream)

                    try:
                        times[name] = eager_us(once, 5)
                    except RuntimeError:  # not built in, or not for this shape
                        torch.cuda.synchronize()
                key = door.shape_key(leaves[0], True, training)
                door.WINNERS[key] = min(times, key=lambda name: times[name])
                shown = ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
                print(f"{key}: {door.WINNERS[key]} ({shown})", flush=True)


if __name__ == "__main__":
    tune()
    door.save_winners(sys.argv[1])

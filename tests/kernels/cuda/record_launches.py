"""What kernels an operation launches, with which types and constants: found by calling its real entry on a CPU.

`python -m tests.kernels.cuda.record_launches CASES.json` writes the cases of every operation below; `compile_sm90`
compiles them. Kernels are not run: launches are recorded in their place, so the cases cannot drift from the code.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise import rms_norm, rope_cache, step_inputs, swiglu
from cumulo.kernels.cuda.moe import few as moe_few
from cumulo.kernels.cuda.moe import moe
from cumulo.kernels.cuda.sampling import rounds, sample, sample_cuts
from cumulo.spec.model import MoESpec
from tests.kernels.cuda.compile_sm90 import Case

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages")


@contextmanager
def recorded_launches() -> Iterator[list[Case]]:
    """Inside, a launch appends a case and does nothing else."""
    from triton.runtime.jit import JITFunction

    cases: list[Case] = []
    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: given.pop(name) for name in _OPTIONS if name in given}
        constants = {name: given[name] for name in given if _is_constant(kernel, name, given[name])}
        types = {name: _type(value) for name, value in given.items() if name not in constants}
        case = Case(f"{kernel.fn.__module__}:{kernel.fn.__name__}", types, constants, **options)
        if case not in cases:
            cases.append(case)

    JITFunction.run = record
    try:
        yield cases
    finally:
        JITFunction.run = run


def _is_constant(kernel: Any, name: str, value: Any) -> bool:
    parameter = kernel.params[kernel.arg_names.index(name)]
    return parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32:16" if value % 16 == 0 else "i32"


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def draw_tokens(dtype: torch.dtype) -> None:
    rows, vocabulary = 2, 151_936
    logits = torch.empty((rows, vocabulary), dtype=dtype)
    shared = sample.SampleBuffers(rows, vocabulary, logits.device)
    cuts = sample_cuts.CutBuffers(rows, vocabulary, logits.device)
    draws = _ints(rows, sample.COLUMNS)
    sample.sample(logits, draws, shared, _ints(rows), _ints(rows, 4097))
    sample_cuts.sample_with_cuts(logits, draws, shared, cuts, _ints(rows), _ints(rows, 4097))


def small_steps() -> None:
    for hidden in (1024, 4096):
        x, weight = _bf16(3, hidden), _bf16(hidden)
        rms_norm.rms_norm(x, weight, 1e-6)
        rms_norm.rms_norm(x, weight, 1e-6, x.clone())
        rms_norm.rms_norm(x, weight, 1e-6, rows=_ints(2))
    swiglu.swiglu(_bf16(2, 2 * 14336))
    cos, positions = _bf16(64, 64), _ints(3)
    for heads, kv_heads, norm in ((16, 8, _bf16(128)), (32, 8, None)):
        qkv, keys = _bf16(3, (heads + 2 * kv_heads) * 128), _bf16(4, kv_heads, 64, 128)
        rope_cache.rope_cache(
            qkv, cos, cos, positions, positions, keys, keys.clone(), heads, norm, norm, 1e-6, False
        )
    row, table, token = _ints(4), _ints(4, 33), _ints(64)
    step_inputs.step_inputs(
        row, row, _ints(5), row, row, _ints(4, 2049), table, 64, token, token.clone(), token.clone(), row.clone(),
        table.clone(),
    )  # fmt: skip
    step_inputs.fill_rows(token, row, row, row, table)
    step_inputs.scatter(row, row, row, table)
    rounds.logit_parts(_bf16(2, 32_000), torch.zeros(2, 1000), _ints(2, 1000))


def mixtures() -> None:
    spec = MoESpec(experts=128, experts_per_token=8, expert_hidden=768)
    router, gate_up, down = _bf16(128, 2048), _bf16(128, 1536, 2048), _bf16(128, 2048, 768)
    for tokens in (1, 64, 256, 512, 4096):
        x = _bf16(tokens, 2048)
        buffers = moe.MoEBuffers(spec, 2048, tokens, torch.bfloat16, x.device)
        # Who multiplies by the router is another operation's matter.
        chosen: Callable[..., Tensor] = lambda x, router, out, invariant: out  # noqa: E731
        original, moe._router_logits = moe._router_logits, chosen
        try:
            moe.mixture(x, router, gate_up, down, buffers, x.clone())
        finally:
            moe._router_logits = original
    # Experts of a few tokens: Mixtral's are wide, DeepSeek-V3's many.
    for hidden, width, per_token in ((4096, 14336, 2), (7168, 2048, 8)):
        x, shares = _bf16(1, hidden), torch.zeros(per_token)
        moe_few.experts_of_few(
            x, _bf16(1, 2 * width, hidden), _bf16(1, hidden, width), _ints(per_token), shares,
            _bf16(per_token, width), x.clone(),
        )  # fmt: skip


GROUPS: dict[str, Callable[[], None]] = {
    "draws, bfloat16": lambda: draw_tokens(torch.bfloat16),
    "draws, float32": lambda: draw_tokens(torch.float32),
    "small steps": small_steps,
    "mixtures": mixtures,
}


def main(path: str, *names: str) -> None:
    found = []
    for name in names or GROUPS:
        with recorded_launches() as cases:
            GROUPS[name]()
        assert cases, f"{name} launched nothing"
        found += [asdict(case) for case in cases]
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

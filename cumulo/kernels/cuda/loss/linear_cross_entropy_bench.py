"""Cross-entropy without the logits, timed: rows for `cumulo bench kernels`, and the size of its chunks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.loss.cross_entropy_rows import default_chunk_rows
from cumulo.kernels.cuda.loss.linear_cross_entropy import linear_cross_entropy, work
from cumulo.kernels.cuda.timing import eager_us
from cumulo.kernels.cuda.work import KernelRow


def bench_rows() -> Iterator[KernelRow]:
    """Forward and backward of the last layer of a 1.24B and an 8B model, beside plain torch."""
    for rows, vocabulary, hidden in ((8192, 128256, 2048), (8192, 128256, 4096), (16384, 49152, 576)):
        generator = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
        weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
        weight *= hidden**-0.5
        targets = torch.randint(0, vocabulary, (rows,), device="cuda", generator=generator)
        leaves = [x.requires_grad_(), weight.requires_grad_()]

        def ours(leaves: list[Tensor] = leaves, targets: Tensor = targets) -> tuple[Tensor, ...]:
            return torch.autograd.grad(linear_cross_entropy(leaves[0], leaves[1], targets), leaves)

        def plain(leaves: list[Tensor] = leaves, targets: Tensor = targets) -> tuple[Tensor, ...]:
            loss = F.cross_entropy(F.linear(leaves[0], leaves[1]).float(), targets)
            return torch.autograd.grad(loss, leaves)

        found, expected = ours(), plain()
        error = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )
        del found, expected
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ours_us = eager_us(ours, 5)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        yield KernelRow(
            "linear_cross_entropy", f"{rows} tokens, {vocabulary} words, hidden {hidden}, with gradients",
            work(rows, vocabulary, hidden), ours_us, {"torch": eager_us(plain, 5)}, error=error,
            config=f"{default_chunk_rows(rows, vocabulary, 2)} rows at once, peak {peak:.2f} GiB",
        )  # fmt: skip


def tune(device: torch.device | str = "cuda") -> dict[str, float]:
    """Milliseconds by rows at once, printed: what _LOGIT_BYTES should be."""
    rows, vocabulary, hidden = 8192, 128256, 2048
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16) * hidden**-0.5
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    weight.requires_grad_()
    found = {}
    for chunk in (1024, 2048, 4096, 8192):

        def once(chunk: int = chunk) -> tuple[Tensor, ...]:
            loss = linear_cross_entropy(x, weight, targets, chunk_rows=chunk)
            return torch.autograd.grad(loss, (x, weight))

        us = eager_us(once, 5)
        found[f"{chunk} rows"] = us / 1e3
        print(f"linear_cross_entropy {rows}x{vocabulary}x{hidden}, {chunk} rows at once: {us / 1e3:.2f} ms")
    return found

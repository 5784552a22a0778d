"""A random step over a paged cache whose unused places are NaN: what the attention tests are made of."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from cumulo.kernels.cpu.paged_attention import reference
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from tests.kernels.cuda.tolerance import poisoned


@dataclass
class PagedCase:
    """Sequences of (new tokens, context length); padding sequences are (0, 0) at the end."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    rank: int = 0  # of latent attention: the columns of keys that are values
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    scale: float = 0.2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        used = [-(-length // self.block_size) for _, length in self.sequences]
        blocks = sum(used) + 2
        order = torch.randperm(blocks, generator=generator).tolist()
        shape = (blocks, self.kv_heads, self.block_size, self.dim)
        self.block_tables = torch.full((len(used), max(used) + 1), 2**30, dtype=torch.int32)
        inside = torch.zeros((blocks, 1, self.block_size, 1), dtype=torch.bool)
        for sequence, ((_, length), count) in enumerate(zip(self.sequences, used, strict=True)):
            table = [order.pop() for _ in range(count)]
            self.block_tables[sequence, :count] = torch.tensor(table, dtype=torch.int32)
            position = torch.arange(length)
            inside[
                torch.tensor(table, dtype=torch.int64)[position // self.block_size],
                0,
                position % self.block_size,
            ] = True
        stored = self.kv_dtype or self.dtype

        def cache() -> Tensor:
            numbers = torch.randn(shape, generator=generator).masked_fill(~inside, float("nan"))
            return numbers.to(stored).to(self.device)

        self.keys, self.values = cache(), cache()
        counts = torch.tensor([0] + [count for count, _ in self.sequences])
        self.query_starts = counts.cumsum(0).to(torch.int32).to(self.device)
        lengths = [length for _, length in self.sequences]
        self.context_lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.block_tables = self.block_tables.to(self.device)
        tokens = int(counts.sum())
        # A view of a wider buffer, as the fused projection gives.
        wide = torch.randn((tokens, self.heads + 2 * self.kv_heads, self.dim), generator=generator)
        self.query = wide.to(self.dtype).to(self.device)[:, : self.heads]

    @property
    def tokens(self) -> int:
        return len(self.query)

    def plan(self, **options: object) -> AttentionPlan:
        settings: dict[str, object] = dict(
            decode_only=all(count <= 1 for count, _ in self.sequences),
            invariant=False,
            kv_dtype=self.keys.dtype,
            rank=self.rank,
        )
        return AttentionPlan(
            self.tokens,
            len(self.sequences),
            self.heads,
            self.kv_heads,
            self.dim,
            self.block_size,
            self.block_tables.shape[1],
            device=self.device,
            **(settings | options),  # type: ignore[arg-type]
        )

    def run(self, plan: AttentionPlan | None = None, plan_options: dict[str, object] | None = None,
            **options: object) -> Tensor:  # fmt: skip
        """The output, every number of which the kernels must have written."""
        if plan is None:
            plan = self.plan(**{"windows": (options.get("window"),), **(plan_options or {})})
        plan.prepare(self.query_starts, self.context_lengths, self.block_tables)
        width = self.rank or self.dim
        out = poisoned(self.tokens, self.heads, width, dtype=self.dtype, device=self.device)
        plan.attend(self.query, self.keys, self.values, out, self.scale, **options)  # type: ignore[arg-type]
        return out

    def reference(self, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        dtype = dtype or self.dtype
        values = self.keys[..., : self.rank] if self.rank else self.values
        batch = SimpleNamespace(
            query_starts=self.query_starts,
            context_lengths=self.context_lengths,
            block_tables=self.block_tables,
        )
        return reference(self.query.to(dtype), self.keys, values, batch, self.scale, **options)  # type: ignore[arg-type]

    def check(self, plan_options: dict[str, object] | None = None, **options: object) -> Tensor:
        """Kernel against float64, allowed twice what torch loses in the same dtype; its output."""
        from tests.kernels.cuda.tolerance import relative_error

        exact, same = self.reference(torch.float64, **options), self.reference(None, **options)
        least = torch.finfo(self.dtype).eps / 2 if self.dtype.itemsize == 2 else 1.2e-7
        allowed = 2 * max(relative_error(same, exact), least)
        out = self.run(None, plan_options, **options)
        error = relative_error(out, exact)
        assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"
        return out

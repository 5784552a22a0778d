"""LatentPlan: what all latent-attention layers of a step share, as AttentionPlan is for grouped heads. The GPU
decoder makes one for each step shape; decodes go to `mla_decode`, chunks to `mla_chunk`, both write one output.

Neither `prepare` nor `attend` waits for the device or depends on anything but shapes, so both can be captured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.errors import CumuloError
from cumulo.kernels.cuda.attention.mla_chunk import MlaChunkConfig, chunk_tiles, launch_mla_chunks
from cumulo.kernels.cuda.attention.mla_decode import MlaConfig, MlaPlan
from cumulo.kernels.cuda.attention.work_list import build_work_list


class LatentPlan:
    """For steps of at most `tokens` tokens of `sequences` sequences with `max_blocks` blocks each.

    With `invariant` a request's bits depend neither on its company nor on how its context was cut into chunks.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        heads: int,
        rank: int,
        rope: int,
        block_size: int,
        max_blocks: int,
        decode_only: bool,
        invariant: bool,
        device: torch.device | str,
        *,
        windows: Sequence[int | None] = (None,),
        share_scratch_with: "LatentPlan | None" = None,
        decode: MlaConfig | None = None,
        chunk: MlaChunkConfig | None = None,
    ) -> None:
        device = torch.device(device)
        self.windows, self.block_size = tuple(dict.fromkeys(windows)), block_size
        self.chunk_from = 1 if invariant else 2  # new tokens from which a sequence is a chunk
        self.decodes: MlaPlan | None = None
        if not invariant:
            shared = share_scratch_with.decodes if share_scratch_with is not None else None
            self.decodes = MlaPlan(
                sequences, heads, rank, rope, block_size, max_blocks, device, windows=windows, config=decode,
                share_scratch_with=shared,
            )  # fmt: skip
        self.chunk = chunk or MlaChunkConfig()
        self.query_tile = self.chunk.query_tile(heads)
        self.tiles: Tensor | None = None
        if invariant or not decode_only:
            self.tiles = chunk_tiles(tokens, sequences, self.chunk_from, heads, self.chunk, device)
        self.tables: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory it keeps, shared scratch included."""
        chunks = self.tiles.nbytes if self.tiles is not None else 0
        return chunks + (self.decodes.nbytes if self.decodes is not None else 0)

    def prepare(self, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor) -> None:
        """Build this step's work lists; the rules are AttentionPlan.prepare's."""
        self.tables = block_tables
        if self.decodes is not None:
            self.decodes.prepare(query_starts, context_lengths, block_tables)
        if self.tiles is not None:
            build_work_list(
                query_starts,
                context_lengths,
                block_tables,
                None,
                self.tiles,
                block_size=self.block_size,
                key_tile=self.chunk.key_tile,
                query_tile=self.query_tile,
                min_tiles=1,
                window=None,  # chunks look at the window themselves
                invariant=False,
                chunk_from=self.chunk_from,
            )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        out: Tensor,
        scale: float,
        window: int | None = None,
        k_scale: float = 1.0,
        lse: Tensor | None = None,
    ) -> Tensor:
        """One layer: query [T, H, rank + rope] over keys [blocks, 1, block_size, rank + rope] into out [T, H,
        rank].

        An 8-bit cache holds true keys / `k_scale`. `lse` [T, H] float32 receives the natural log-sum-exp of the
        scaled scores.
        """
        assert self.tables is not None, "prepare the plan first"
        if window not in self.windows:
            raise CumuloError(
                f"latent attention was planned for windows {self.windows} but a layer asks for {window}: "
                "name every window of the model in LatentPlan(windows=...)"
            )
        if self.decodes is not None:
            self.decodes.attend(query, keys, out, scale, window, k_scale, lse)
        if self.tiles is not None:
            launch_mla_chunks(
                query, keys, out, self.tiles, self.tables, scale, window, k_scale, lse, self.chunk
            )
        return out


@torch.library.custom_op("cumulo::latent_attention", mutates_args=())
def latent_attention_op(
    query: Tensor, keys: Tensor, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor, rank: int,
    scale: float, window: int | None = None, k_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step without a plan of one's own: (out, lse)."""
    tokens, heads, dim = query.shape
    plan = LatentPlan(
        tokens, len(context_lengths), heads, rank, dim - rank, keys.shape[2], block_tables.shape[1], False, False,
        query.device, windows=(window,),
    )  # fmt: skip
    out = query.new_zeros((tokens, heads, rank))
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=query.device)
    plan.prepare(query_starts, context_lengths, block_tables)
    plan.attend(query, keys, out, scale, window, k_scale, lse)
    return out, lse


@latent_attention_op.register_fake
def _(
    query: Tensor, keys: Tensor, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor, rank: int,
    scale: float, window: int | None = None, k_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, _ = query.shape
    return query.new_empty((tokens, heads, rank)), query.new_empty((tokens, heads), dtype=torch.float32)

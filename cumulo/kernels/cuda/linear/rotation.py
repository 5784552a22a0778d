"""PagedRotation: what a product of queries, keys and values needs to rotate them and to write keys and values to
their pages itself, so that no other kernel comes between it and attention. `linear` passes it on; rope_cache does
the same behind products that cannot.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRotation:
    """Halves of a head turn together, by the angle of each token's position. cos, sin [positions, dim / 2];
    positions, slots [M] int32 (slot -1: keys and values go nowhere); keys, values [blocks, kv_heads, block_size,
    dim], of the same strides."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: int

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def dim(self) -> int:
        return self.keys.shape[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.cos, self.sin, self.positions, self.slots, self.keys, self.values

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def strides(self) -> tuple[int, int]:
        """Of a block and of a head."""
        return self.keys.stride(0), self.keys.stride(1)

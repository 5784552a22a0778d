"""StoredTensor: which tensors a storage format keeps for one matrix. The loaders check a folder against it before a
byte of weights is read; each format lists its own."""

from dataclasses import dataclass

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str  # behind the module's own: qweight, weight_scale
    shapes: tuple[tuple[int, ...], ...]  # of which it must have one
    dtypes: tuple[str, ...]
    required: bool = True

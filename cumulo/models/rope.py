"""Rotary position embedding (Su et al. 2021) and its context extensions: a table of angles made once per
model, read once per step by the decoder, applied in every layer by attention.

Frequencies and angles are computed in float32 whatever the model's dtype, as in training and in
`transformers`: at position 100,000 a more exact angle would be a different one.
"""

import math

import torch
from torch import Tensor

from cumulo.spec.model import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """The angle per position of every rotated pair, [rope_dim / 2] float32, context extension included."""
    exponents = torch.arange(0, spec.rope_dim, 2, dtype=torch.float32) / spec.rope_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(spec, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Dubey et al. 2024)."""
    turns = scaling.original_context / (2 * math.pi / frequencies)  # rotations within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(spec: ModelSpec, scaling: RopeScaling) -> Tensor:
    """NTK-by-parts interpolation (Peng et al. 2023, section 3.2)."""
    dim = spec.rope_dim

    def dimension_with(turns: float) -> float:
        """The dimension that makes this many rotations within the trained context."""
        return (
            dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))
        )

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = spec.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """How much attention is sharpened for a context stretched by `factor` (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotation_magnitude(spec: ModelSpec) -> float:
    """What cosine and sine are multiplied by: 1 but for yarn, which folds its temperature in here."""
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_magnitude(scaling.factor)


class Rotation:
    """The angles of one step's tokens, ready to be applied to [T, heads, rope_dim] in every layer."""

    def __init__(self, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        """cos and sin are [T, rope_dim / 2] in the dtype of the model."""
        self.interleaved = interleaved
        self.angles = cos, sin
        # One complex product replaces four real operations, but torch has it for float32 and float64 only.
        self.complex: Tensor | None = None
        if interleaved and cos.dtype in (torch.float32, torch.float64):
            self.complex = torch.complex(cos, sin)[:, None]
            return
        # x·cos + partner(x)·sin, where the pair's first element gets -sin.
        if interleaved:
            self.cos = torch.stack((cos, cos), -1).flatten(-2)[:, None]
            self.sin = torch.stack((-sin, sin), -1).flatten(-2)[:, None]
        else:
            self.cos = torch.cat((cos, cos), -1)[:, None]
            self.sin = torch.cat((-sin, sin), -1)[:, None]

    def apply(self, x: Tensor) -> Tensor:
        if self.complex is not None:
            pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * self.complex).flatten(-2)
        if self.interleaved:
            partner = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, partner, self.sin)


class RotaryTable:
    """Cosine and sine of every position up to the longest context, [positions, rope_dim / 2] each.

    `positions` is the model's own context until an engine that serves a shorter one says so: what a file claims
    must not decide how much memory is taken.

    Made at the first step, on the device of that step's positions, so that a decoder can be built without
    memory (on the meta device) and moved before it is used.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.positions = spec.max_context
        self.table: tuple[Tensor, Tensor] | None = None

    def serve(self, max_context: int) -> None:
        """Before the first step: no token will stand beyond this context (nor, drawn last, one place behind it)."""
        self.positions, self.table = min(self.positions, max_context + 1), None

    def rotation_at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at these positions [T]."""
        if self.table is None or self.table[0].device != positions.device:
            self.table = self._build(positions.device)
        cos, sin = self.table
        return Rotation(cos[positions], sin[positions], self.spec.rope_interleaved)

    def _build(self, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(self.spec)
        magnitude = rotation_magnitude(self.spec)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        return cos.to(device, self.dtype), sin.to(device, self.dtype)

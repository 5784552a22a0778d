"""A device profile from measurements: times of a few operations made into the constants of `compute_profile`.
`cumulo calibrate` measures and calls it.

What one device cannot show (how much of its collectives a rank waits for, what a mixture's host costs) is taken
from the profile it is based on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import yaml

from cumulo.errors import ConfigError
from cumulo.plan.time.compute import BACKWARD_ATTENTION
from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.device import Device

Kind = Literal["matmul", "attention", "attention backward", "elementwise", "loss", "optimizer", "launch"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long one operation took, and the work that was in it."""

    kind: Kind
    seconds: float
    # matmul: FLOPs and operand bytes. attention: causal FLOPs of the forward. elementwise: bytes that ideal fusion
    # would move. loss: logits. optimizer: parameters. launch: layers.
    work: float
    operand_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.work > 0):
            raise ConfigError(f"a measurement needs time and work above 0, got {self}")


def calibrated(
    base: Profile, device: Device, dtype: str, measured: Sequence[Measurement], software: str, note: str
) -> Profile:
    """`base` with every constant that the measurements speak about."""
    peak = device.flops(dtype)
    wide_peak = device.flops("bfloat16" if dtype == "float8" else dtype)
    bandwidth = device.memory_bytes_per_s
    by_kind: dict[str, list[Measurement]] = {}
    for each in measured:
        by_kind.setdefault(each.kind, []).append(each)
    found: dict[str, float] = {}
    if products := by_kind.get("matmul"):
        found["matmul_efficiency"], found["matmul_traffic"] = product_constants(products, peak, bandwidth)
    if forward := by_kind.get("attention"):
        found["attention_forward_efficiency"] = max(
            each.work / (each.seconds * wide_peak) for each in forward
        )
    if backward := by_kind.get("attention backward"):
        best = max(BACKWARD_ATTENTION * each.work / (each.seconds * wide_peak) for each in backward)
        found["attention_backward_efficiency"] = best
    for kind, constant in (
        ("elementwise", "elementwise_passes"),
        ("loss", "logit_bytes"),
        ("optimizer", "optimizer_bytes"),
    ):
        if some := by_kind.get(kind):
            found[constant] = min(each.seconds * bandwidth / each.work for each in some)
    if launches := by_kind.get("launch"):
        found["launch_s"] = min(each.seconds / each.work for each in launches)
    return replace(base, software=software, devices=device.name, dtype=dtype, note=note, **found)  # type: ignore[arg-type]


def product_constants(measured: Sequence[Measurement], peak: float, bandwidth: float) -> tuple[float, float]:
    """Efficiency and exposed share of traffic: seconds ≈ FLOPs/(peak·efficiency) + share·bytes/bandwidth, with the
    least squares of relative errors; a share below 0 means that nothing is exposed."""
    rows = [
        (each.work / peak / each.seconds, each.operand_bytes / bandwidth / each.seconds) for each in measured
    ]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    sa, sb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        inverse, share = (sa * bb - sb * ab) / determinant, (sb * aa - sa * ab) / determinant
        if share >= 0 and inverse > 0:
            return 1 / inverse, share
    return aa / sa, 0.0


def as_yaml(profile: Profile, base_name: str, base: Profile) -> str:
    """A file that `Profiles.load` puts on top of what ships: only what differs from the base."""
    own = {
        name: float(f"{value:.3g}") if isinstance(value, float) else value
        for name, value in asdict(profile).items()
        if value != getattr(base, name)
    }
    name = f"{profile.software}-{profile.devices}-{profile.dtype}"
    content: Mapping[str, object] = {"profiles": {name: {"base": base_name, **own}}}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=116)


def constants() -> tuple[str, ...]:
    """Names of the numbers in a profile."""
    return tuple(field.name for field in fields(Profile) if field.type in (float, "float"))

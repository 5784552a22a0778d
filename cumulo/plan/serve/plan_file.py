"""A deployment as a file that `cumulo serve --plan` starts: the server's options, by their names, and what was
predicted. Written by `cumulo plan serve --out`."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.quantities import quantity
from cumulo.base.strict import build, read_yaml
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import BatchLimits
from cumulo.errors import ConfigError
from cumulo.plan.serve.deployment import Deployment, Promised
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class PlannedFor:
    """What the options were chosen for, and what the simulation says of it."""

    device: str  # of the catalogue
    devices: int
    rate: float  # requests/s of all replicas together
    slo_percentile: float
    output_tok_s: float  # of all replicas together
    ttft_s: float | None = None  # at that percentile
    itl_s: float | None = None
    # With the SLO promised: requests that are refused or, with slo_late, served without a promise; and those of the
    # others that keep it
    unpromised_share: float | None = None
    kept_share: float | None = None
    catalogue_model: str | None = None  # where the plan knows a model's shape, and no weights

    def __str__(self) -> str:
        times = [
            f"{name} p{self.slo_percentile:g} {quantity(seconds, 's')}"
            for name, seconds in (("TTFT", self.ttft_s), ("ITL", self.itl_s))
            if seconds is not None
        ]
        if self.kept_share is not None:
            times.append(f"{100 * self.kept_share:.4g}% of promises kept")
        said = ", ".join([*times, quantity(self.output_tok_s, "tok/s")])
        return f"{said} at {self.rate:g} requests/s on {self.devices} × {self.device}"


@dataclass(frozen=True, slots=True)
class ServePlanFile(BatchLimits):
    planned_for: PlannedFor
    model: str | None = None
    device: str = "cuda"
    weights: str | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1
    prefill: int = 0
    decode: int = 0  # instead of `replicas`
    router: str = "prefix-aware"
    max_context: int | None = None
    kv_dtype: str | None = None
    kv_host_gib: float = 0.0
    kv_disk: str = ""
    speculate: str | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    slo: str = ""  # that the server promises
    slo_late: str = "refuse"

    @property
    def engines(self) -> int:
        return self.prefill + (self.decode or self.replicas)

    @property
    def ranks(self) -> int:
        return self.engines * self.tp * self.pp

    def options(self) -> dict[str, Any]:
        """Options of `cumulo serve`, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "planned_for"}


def plan_file(best: Deployment, model: str, slo: Slo, promise: Promised | None = None) -> ServePlanFile:
    """`model`: a folder with weights, or a name of the catalogue. `promise`: what a replica keeps of the SLO if it
    promises it; None: it does not."""
    replica, report = best.replica, best.report
    config = replica.engine_config()
    weights = Path(model).resolve() if Path(model).exists() else None
    split = best.prefill_replicas > 0
    return ServePlanFile(
        PlannedFor(
            replica.device.name,
            best.gpus,
            best.rate,
            slo.percentile,
            _rounded(best.output_tok_s),
            None if report.ttft_s is None else _rounded(report.ttft_s.at_slo),
            None if report.itl_s is None else _rounded(report.itl_s.at_slo),
            None if promise is None else _rounded(promise.unpromised_share),
            None if promise is None else _rounded(promise.kept_share),
            model if weights is None else None,
        ),
        model=None if weights is None else str(weights),
        device=config.device,
        weights={"float8": "fp8", "int4": "int4"}.get(replica.weights),
        tp=replica.tp,
        pp=replica.pp,
        ep=replica.ep,
        replicas=1 if split else best.replicas,
        prefill=best.prefill_replicas,
        decode=best.replicas if split else 0,
        max_context=replica.roomy_context(),
        max_running=config.max_running,
        max_tokens_per_step=config.max_tokens_per_step,
        kv_dtype="fp8" if replica.kv == "float8" else None,
        kv_host_gib=replica.kv_host_gib,
        kv_disk=f"{replica.kv_disk}:{replica.kv_disk_gib:g}" if replica.kv_disk else "",
        speculate=replica.speculate if replica.acceptance else None,
        max_loras=replica.max_loras or None,
        max_lora_rank=replica.max_lora_rank if replica.max_loras else None,
        slo="" if promise is None else slo.text,
        slo_late="refuse" if promise is None else promise.late,
    )


def differing(planned: ServePlanFile) -> dict[str, Any]:
    """Options that a plain `cumulo serve` would not have, by name."""
    usual = ServePlanFile(planned.planned_for, device=planned.device)
    standard = EngineConfig().settled(planned.device)
    found = {
        name: value
        for name, value in planned.options().items()
        if name not in ("model", "device") and value != getattr(usual, name)
    }
    for name in ("max_running", "max_tokens_per_step"):
        if found.get(name) == getattr(standard, name):
            del found[name]
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def plan_text(plan: ServePlanFile, command: str) -> str:
    """YAML without what is as usual; the command that made it stands above."""
    usual = replace(ServePlanFile(plan.planned_for), device="")
    chosen = {name: value for name, value in plan.options().items() if value != getattr(usual, name)}
    head = f"# {command}\n# predicted: {plan.planned_for}\n"
    predicted = {name: value for name, value in asdict(plan.planned_for).items() if value is not None}
    return head + yaml.safe_dump(chosen | {"planned_for": predicted}, sort_keys=False, allow_unicode=True)


def read_plan(path: Path) -> ServePlanFile:
    content = read_yaml(path, "the plan")
    if not isinstance(content, dict) or "planned_for" not in content:
        raise ConfigError(f"{path} is not a plan that `cumulo plan serve --out` wrote: it has no planned_for")
    return build(ServePlanFile, content, f"the plan {path}")


def check_places(plan: ServePlanFile, present: int, unit: str) -> None:
    """`present`: how many ranks there is a place for on this machine."""
    if plan.ranks <= present:
        return
    each = plan.tp * plan.pp
    what = f"{plan.engines} engine{'s' if plan.engines > 1 else ''} of {each} rank{'s' if each > 1 else ''}"
    fit = present // each
    advice = (
        f"start {fit} of them here with --replicas {fit}, the others elsewhere, and `cumulo gateway` in front"
        if fit and not plan.prefill
        else f"plan with --max-gpus {present}"
        if present
        else "plan for a device that this machine has, with --devices"
    )
    raise ConfigError(f"the plan starts {what}, and this machine has {present} {unit}: {advice}")

"""Options of `cumulo plan train` that say how the job is carried out, and what published systems chose."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cumulo.cli.shared.declare import option, typed_names

_SOFTWARE = "Software"


@dataclass(frozen=True, kw_only=True)
class SoftwareOptions:
    """How the job is carried out."""

    like: str | None = option(
        "Take software, layout and number formats from a published system: deepseek-v3, llama-3, megascale or "
        "mt-nlg. Options that are given, --fixed too, take precedence.",
        None,
        panel=_SOFTWARE,
    )
    software: str = option(
        "Generation of software: current, nemo-2025, megatron-core-2024, megatron-bridge-2026, "
        "torchtitan-2024-compile, fsdp-2023, cumulo-2026, ... ",
        "current",
        panel=_SOFTWARE,
    )
    date: str | None = option(
        "Year and month in which the job runs, such as 2026-02, if --software is omitted: framework versions "
        "that were released later are not considered. Default: any version.",
        None,
        panel=_SOFTWARE,
    )
    overlap_tensor: bool | None = option(
        "Hide tensor-parallel collectives behind matrix products. Default: as the software does.",
        None,
        "--overlap-tensor/--no-overlap-tensor",
        panel=_SOFTWARE,
    )
    expert_exchange: str | None = option(
        "How tokens reach experts: once (to each rank that wants them) or all-to-all (for each expert). Default: "
        "as the software does.",
        None,
        panel=_SOFTWARE,
    )
    overlap_expert: bool = option(
        "Exchange tokens behind the computation of another micro-batch.",
        False,
        "--overlap-expert",
        panel=_SOFTWARE,
    )
    predict_ahead: int = option(
        "Further tokens that extra layers predict (MTP).", 0, "--mtp", panel=_SOFTWARE, min=0
    )
    moment_dtype: str = option(
        "Number format of the optimizer's moments: float32 or bfloat16.", "float32", panel=_SOFTWARE
    )
    narrow_activations: bool = option(
        "Keep activations for the backward pass in 8 bits.", False, "--narrow-activations", panel=_SOFTWARE
    )
    lora_rank: int | None = option(
        "Train only adapters of this rank (LoRA); the weights are frozen.", None, panel=_SOFTWARE, min=1
    )
    lora_targets: str = option(
        "Projections that get adapters, joined by commas: qkv, output, gate_up, down, as in `cumulo train`.",
        "qkv,output,gate_up,down",
        panel=_SOFTWARE,
    )
    frozen_bits: int = option("Bits of a frozen weight: 16, 8, or 4 (QLoRA).", 16, panel=_SOFTWARE)

    def words(self) -> list[str]:
        """The options that differ from their defaults, as they are typed."""
        found = []
        for each in fields(self):
            value, name = getattr(self, each.name), {"predict_ahead": "mtp"}.get(each.name, each.name)
            flag = f"--{name.replace('_', '-')}"
            if value == each.default:
                continue
            if isinstance(value, bool):
                found.append(flag if value else f"--no-{flag[2:]}")
            else:
                found.append(f"{flag} {value}")
        return found

    def system(self) -> Mapping[str, Any]:
        """What the system named by --like chose, except where an option was given."""
        from cumulo.plan.search.unnamed import system_named

        chosen = system_named(self.like) if self.like else {}
        return {name: value for name, value in chosen.items() if name not in typed_names()}

    def traits(self) -> dict[str, Any]:
        """For `TrainGoal`."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "like"}
        own["lora_targets"] = tuple(filter(None, (name.strip() for name in self.lora_targets.split(","))))
        known = {*own, "flash_attention"}
        own["software_named"] = self.like is not None or "software" in typed_names()
        return {**own, **{name: value for name, value in self.system().items() if name in known}}

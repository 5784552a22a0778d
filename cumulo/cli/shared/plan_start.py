"""A plan file as options of `cumulo serve`: what is typed comes before what the plan says."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cumulo.cli.shared.declare import typed_names

if TYPE_CHECKING:
    from cumulo.plan.serve.plan_file import ServePlanFile

T = TypeVar("T")


def with_plan(chosen: T, path: Path) -> T:
    """The options with those of the plan filled in; refused where this machine cannot start it."""
    from cumulo.cli.shared.terminal import note
    from cumulo.errors import CumuloError
    from cumulo.plan.serve.plan_file import read_plan

    plan = read_plan(path)
    filled = _filled(chosen, plan.options())
    _check(filled, plan)
    if filled.model is None and plan.planned_for.catalogue_model is not None:  # type: ignore[attr-defined]
        raise CumuloError(
            f"the plan is for {plan.planned_for.catalogue_model} as the catalogue describes it, without weights: "
            f"name a folder, a GGUF file or a Hugging Face model, as in: cumulo serve MODEL --plan {path}"
        )
    note(f"the plan predicts: {plan.planned_for}")
    return filled


def _check(filled: Any, plan: "ServePlanFile") -> None:
    from cumulo.base.machine import LEAST_CPU_RANKS, gpus_here
    from cumulo.base.report import available_cores
    from cumulo.plan.serve.plan_file import check_places

    engine = filled.engine
    started = dataclasses.replace(
        plan, replicas=filled.replicas, prefill=filled.prefill, decode=filled.decode, tp=engine.tp or 1,
        pp=engine.pp or 1,
    )  # fmt: skip
    if engine.device == "cpu":
        check_places(started, max(available_cores(), LEAST_CPU_RANKS), "CPU cores")
    else:
        check_places(started, len(gpus_here()), "GPUs")


def _filled(chosen: T, told: dict[str, Any]) -> T:
    typed = typed_names()
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(chosen):  # type: ignore[arg-type]
        value = getattr(chosen, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _filled(value, told)
        elif field.name in told and field.name not in typed:
            changes[field.name] = told[field.name]
    return dataclasses.replace(chosen, **changes)  # type: ignore[type-var]

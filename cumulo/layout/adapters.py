"""Names and shapes of the parameters that low-rank adapters add to a model. Runs and the ledger ask. Pure."""

from collections.abc import Sequence

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError
from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import parameter_shapes


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of a low-rank adapter's two."""
    return name.endswith((".lora_a", ".lora_b"))


def adapter_shapes(spec: ModelSpec, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of the parameters that adapters add to a whole model, by name. Targets that it has not are refused."""
    found: dict[str, tuple[int, ...]] = {}
    kinds: set[str] = set()
    for name, shape in parameter_shapes(spec).items():
        module, _, last = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if not name.startswith("layers.") or last != "weight" or len(shape) != 2 or kind == "router":
            continue
        kinds.add(kind)
        if kind in targets:
            outputs, inputs = shape
            found |= {f"{module}.lora_a": (rank, inputs), f"{module}.lora_b": (outputs, rank)}
    for target in targets:
        if target not in kinds:
            hint = did_you_mean(target, sorted(kinds), quoted=True)
            raise ConfigError(f"lora.targets: this model has no projection {target!r}{hint}")
    return found

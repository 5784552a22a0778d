"""Names and shapes of the parameters that low-rank adapters add to a model. Runs and the ledger ask. Pure."""

from collections.abc import Sequence

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec

# Matrices of a layer whose adapters are served, and of how many of a file's matrices each is made.
SERVED_SECTIONS = {
    "qkv": 3, "output": 1, "gate_up": 2, "down": 1, "q": 1, "q_a": 1, "q_b": 1, "kv_a": 1,
}  # fmt: skip
_RANK_STEP = 16  # a tile of the kernels


def padded_rank(rank: int) -> int:
    """What adapters of this rank take room for."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


def served_elements(spec: ModelSpec, rank: int) -> int:
    """Numbers that the room for one adapter of up to this rank has, in a model or in a rank's part of one."""
    total = 0
    for name, shape in parameter_shapes(spec).items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if name.startswith("layers.") and name.endswith(".weight") and kind in SERVED_SECTIONS:
            outputs, inputs = shape
            total += padded_rank(rank) * (SERVED_SECTIONS[kind] * inputs + outputs)
    return total


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

"""Export of low-rank adapters in the layout of Hugging Face's PEFT, which `peft` and other servers open. Called by
the trainer at the end of a run with adapters.

The decoder fuses query, key and value, and gate and up. An adapter of a fused matrix is one A, which all parts
share, and one B whose rows belong to the parts; PEFT wants a pair for each part.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cumulo.checkpoint.play.folder import MANIFEST, write_whole
from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import write_json
from cumulo.spec.model import ModelSpec


def export_peft(
    folder: Path,
    spec: ModelSpec,
    parameters: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    base_model: str,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors; an earlier export is replaced. `parameters` has the
    adapters under the decoder's names; `base_model` is what was adapted, as its user calls it."""
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    for placement in names_huggingface.placements(spec):
        target = placement.target.removesuffix(".weight")
        if f"{target}.lora_a" not in parameters:
            continue
        module = placement.source.removesuffix(".weight")
        first = placement.offset[0] if placement.offset else 0
        rows = parameters[f"{target}.lora_b"].detach()[first : first + placement.shape[0]]
        tensors[f"base_model.model.{module}.lora_A.weight"] = _own(parameters[f"{target}.lora_a"])
        tensors[f"base_model.model.{module}.lora_B.weight"] = _own(rows)
        modules.add(module.rpartition(".")[2])
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": sorted(modules), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip

    def fill(aside: Path) -> None:
        save_file(tensors, aside / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(aside / "adapter_config.json", config)

    write_whole(folder, fill)
    (folder / MANIFEST).unlink()  # as in the model's folder: its users change it


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()

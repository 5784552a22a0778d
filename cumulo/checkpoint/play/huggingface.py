"""Exports: a model as a Hugging Face folder, which `cumulo chat`, `cumulo serve` and `transformers` open, and
low-rank adapters as a folder of PEFT. The trainer calls them at the end, with the parameters under their own names.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cumulo.checkpoint.play.folder import MANIFEST, write_whole
from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import write_json
from cumulo.models.files.safetensors_file import INDEX_NAME
from cumulo.spec.model import ModelSpec
from cumulo.spec.to_huggingface import config_from_spec

SHARD_BYTES = 5 << 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export_huggingface(
    folder: Path, spec: ModelSpec, parameters: Mapping[str, Tensor], tokenizer_folder: Path | None
) -> None:
    """Write config.json, safetensors, the tokenizer and its chat template; an earlier export is replaced."""
    tensors = {
        placement.source: _own(placement.region(parameters[placement.target].detach()), placement.transposed)
        for placement in names_huggingface.placements(spec)
    }

    def fill(aside: Path) -> None:
        _write_weights(aside, tensors)
        write_json(aside / "config.json", config_from_spec(spec))
        ends = list(spec.eos_token_ids)
        write_json(aside / "generation_config.json", {"eos_token_id": ends} if ends else {})
        if tokenizer_folder is not None:
            for name in _TOKENIZER_FILES:
                if (tokenizer_folder / name).is_file():
                    shutil.copyfile(tokenizer_folder / name, aside / name)

    write_whole(folder, fill)
    (folder / MANIFEST).unlink()  # for whoever trains on; a model folder is changed by its users


def _own(region: Tensor, transposed: bool = False) -> Tensor:
    return (region.transpose(-1, -2) if transposed else region).cpu().contiguous().clone()


def _write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


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
        tensors[f"base_model.model.{module}.lora_A.weight"] = _own(parameters[f"{target}.lora_a"].detach())
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

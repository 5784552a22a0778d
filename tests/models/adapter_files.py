"""Random low-rank adapters in PEFT's layout, for any decoder: always the same for one seed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cumulo.models.adapters.files import adaptable_matrices
from cumulo.spec.model import ModelSpec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """A folder with an adapter of every projection named in `targets`; `config`: further fields of its file."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for matrix in adaptable_matrices(spec):
        for section in matrix.sections:
            if section.source.rpartition(".")[2] not in targets:
                continue
            outputs, inputs = section.whole
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * strength / rank
            tensors[f"base_model.model.{section.source}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{section.source}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder

"""Export: a model as a Hugging Face folder, which `cumulo chat`, `cumulo serve` and `transformers` open. Called by
the trainer at the end, with the parameters of a decoder under their own names."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cumulo.checkpoint.play.folder import MANIFEST, write_whole
from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import write_json
from cumulo.models.files.weights_safetensors import INDEX_NAME
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


def _own(region: Tensor, transposed: bool) -> Tensor:
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

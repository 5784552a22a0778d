"""The multi-token-prediction module in a DeepSeek-V3 folder: the layer behind the last. For `speculate=mtp`."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from cumulo.errors import ConfigError, ModelError
from cumulo.models.files.json_file import read_json
from cumulo.models.files.names_huggingface import mtp_placements
from cumulo.models.files.placement import check_tensors
from cumulo.models.files.weights_safetensors import FileTensor, read_directory
from cumulo.models.heads.mtp import MtpHead
from cumulo.spec.model import ModelSpec

_BLOCK = 128  # rows and columns that share a scale in DeepSeek's fp8


def load_mtp(folder: Path, served: ModelSpec, *, dtype: torch.dtype = torch.float32) -> MtpHead:
    """The module of a served model's own folder, or an error that says why there is none."""
    count = (
        int(read_json(folder / "config.json").get("num_nextn_predict_layers") or 0) if folder.is_dir() else 0
    )
    tensors = read_directory(folder) if count else {}
    source = f"model.layers.{served.layers}."
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(source)}
    if not own:
        raise ConfigError(
            f"speculate=mtp needs a folder with a multi-token-prediction layer, such as DeepSeek-V3's; {folder} "
            "has none: use speculate=ngram, a draft model or a head"
        )
    head = MtpHead(served, dtype=dtype)
    placements = list(mtp_placements(served))
    # Further modules, the shared embedding and fp8 scales may lie there, too.
    check_tensors(str(folder), placements, {name: one.shape for name, one in own.items()}, lambda name: True)
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        for one in placements:
            one.region(parameters[one.target]).copy_(_read(one.source, tensors))
    return head


def _read(name: str, tensors: dict[str, FileTensor]) -> Tensor:
    tensor = _plain(name, tensors)
    scales = f"{name}_scale_inv"
    if scales not in tensors:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(
                f"{tensors[name].file} has {name} in {tensor.dtype}: 16 or 32 bits, or DeepSeek's fp8"
            )
        return tensor
    scale = _plain(scales, tensors).float()
    rows, columns = tensor.shape
    spread = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return tensor.float() * spread


def _plain(name: str, tensors: dict[str, FileTensor]) -> Tensor:
    with safe_open(tensors[name].file, framework="pt", device="cpu") as handle:
        found: Tensor = handle.get_tensor(name)
    return found

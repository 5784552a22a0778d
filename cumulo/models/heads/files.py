"""Eagle heads in Hugging Face folders, as SafeAILab publishes EAGLE-3 heads and serving engines read them.

config.json is that of a Llama of one layer, with `draft_vocab_size`. Tensors: fc (from three hidden states to one),
midlayer.* (the layer; its projections see token and stream side by side), norm, lm_head (over the draft
vocabulary), and d2t: what to add to a draft token's number to have the served model's.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.packed_linear import GROUP, PackedColumns, PackedWeight
from cumulo.models.files.json_file import read_json, shown, write_json
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.linear import Linear
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
_WEIGHTS = "model.safetensors"
_TAPS = 3


def is_eagle_folder(path: Path) -> bool:
    return path.is_dir() and bool((read_json(path / "config.json") or {}).get("draft_vocab_size"))


def load_eagle(
    folder: Path, served: ModelSpec, *, dtype: torch.dtype = torch.float32, pack: bool = True
) -> EagleHead:
    """A head for the served model, or a ModelError that says what does not belong together. `pack`: its matrices
    are quantised to 8 bits for the CPU's kernels; a draft is verified anyway."""
    config = read_json(folder / "config.json") or {}
    spec = replace(
        spec_from_config({"model_type": "llama", **config}), layers=1, max_context=served.max_context
    )
    if spec.hidden != served.hidden or spec.vocab_size != served.vocab_size:
        raise ModelError(
            f"{folder} drafts for a model of hidden size {spec.hidden:,} and {spec.vocab_size:,} tokens, but the "
            f"served one has {served.hidden:,} and {served.vocab_size:,}; choose the head that was trained for it"
        )
    path = folder / _WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder} has no {_WEIGHTS}; convert the head's weights to safetensors")
    count = config.get("draft_vocab_size")
    if type(count) is not int or not 1 <= count <= served.vocab_size:
        raise ModelError(
            f"{folder / 'config.json'}: draft_vocab_size must be 1 to {served.vocab_size:,}, not {shown(count)}"
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {name.removeprefix("model."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        head = EagleHead(spec, _TAPS * served.hidden, count, dtype=dtype)
        _fill(head, tensors)
    except KeyError as error:
        raise ModelError(f"{path} has no tensor {error}: it is not an EAGLE-3 head") from None
    except (SafetensorError, RuntimeError, OSError) as error:  # torch's, of shapes that do not go together
        raise ModelError(f"{path} cannot be read as an EAGLE-3 head: {error}") from error
    if pack:
        _pack(head)
    return head


def _pack(head: EagleHead) -> None:
    if head.spec.hidden % GROUP == 0:  # what a token and what the stream says, each with a matrix of its own
        halves = head.qkv.weight.chunk(2, dim=1)
        head.qkv.pack(PackedColumns([_packed(half) for half in halves]))
    for module in head.modules():
        if isinstance(module, Linear) and module.packed is None and module.shape[1] % GROUP == 0:
            module.pack(_packed(module.weight))


def _fill(head: EagleHead, tensors: Mapping[str, Tensor]) -> None:
    layer = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    joined = {
        "qkv.weight": [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"],
        "ffn.gate_up.weight": [f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"],
    }
    joined |= {ours: [theirs.format(layer=layer)] for ours, theirs in _NAMES.items()}
    for ours, names in joined.items():
        value = torch.cat([tensors[name] for name in names])
        parameter = head.get_parameter(ours)
        if parameter.shape != value.shape:
            raise ModelError(
                f"the head's {', '.join(names)} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)}"
            )
        parameter.data.copy_(value)
    numbers = torch.arange(len(head.token_of))
    if "d2t" in tensors:
        numbers = numbers + tensors["d2t"].to(torch.int64)
    if numbers.shape != head.token_of.shape or not bool(
        ((numbers >= 0) & (numbers < head.spec.vocab_size)).all()
    ):
        raise ModelError("the head's d2t names tokens that the served model does not have")
    head.token_of = numbers


_NAMES = {
    "fc.weight": "fc.weight",
    "token_norm.weight": "{layer}input_layernorm.weight",
    "stream_norm.weight": "{layer}hidden_norm.weight",
    "output.weight": "{layer}self_attn.o_proj.weight",
    "ffn_norm.weight": "{layer}post_attention_layernorm.weight",
    "ffn.down.weight": "{layer}mlp.down_proj.weight",
    "final_norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}


def save_eagle(folder: Path, head: EagleHead) -> None:
    """The same folder, for this and for other engines. The head must not be packed."""
    spec, layer = head.spec, "midlayer."
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": spec.hidden, "intermediate_size": spec.ffn_hidden, "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(head.token_of), "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_context, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {theirs.format(layer=layer): head.get_parameter(ours).data for ours, theirs in _NAMES.items()}
    for name, part in zip("qkv", head.qkv.weight.data.split((width, kv, kv)), strict=True):
        tensors[f"{layer}self_attn.{name}_proj.weight"] = part
    for name, part in zip(("gate", "up"), head.ffn.gate_up.weight.data.chunk(2), strict=True):
        tensors[f"{layer}mlp.{name}_proj.weight"] = part
    tensors["d2t"] = head.token_of - torch.arange(len(head.token_of))
    known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    known[head.token_of] = True
    tensors["t2d"] = known
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / _WEIGHTS)


def _packed(weight: Tensor) -> PackedWeight:
    """With 8-bit activations: of 214 drafts for a 135M model as many were right as with 16 bits."""
    return PackedWeight.pack(_eight_bits(weight), activation_bits=8)


def _eight_bits(weight: Tensor) -> AffineBlocks:
    """Rounded to the nearest of 255 values, a scale for every 32 columns."""
    values = weight.detach().float().numpy()
    groups = values.reshape(len(values), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(axis=2), 1e-12).astype(np.float16).astype(np.float32) / 127
    scale = np.maximum(scale, 1e-7).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[:, :, None]), -127, 127).astype(np.int8)
    return AffineBlocks(codes.reshape(values.shape), scale, None, 8, GROUP)

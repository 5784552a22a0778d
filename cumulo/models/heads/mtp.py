"""MtpHead: the multi-token-prediction module of DeepSeek-V3 as a drafter (DeepSeek-AI 2024, section 2.2).

One more layer of the model's own kind: at a place it sees the model's last hidden state next to the embedding of
the token that was drawn behind it, and says which token comes after that. Behind its own proposals it takes its own
output in place of the hidden state. It has the calls of an EagleHead, and EagleDraft plays both.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from cumulo.errors import ConfigError, ModelError
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Layer
from cumulo.models.files.json_file import read_json
from cumulo.models.files.names_huggingface import mtp_placements
from cumulo.models.files.placement import check_tensors
from cumulo.models.files.quantised.matrices import Float8Matrix
from cumulo.models.files.safetensors_file import FileTensor, FolderTensors, read_directory
from cumulo.models.linear import Linear, RMSNorm
from cumulo.models.rope import RotaryTable
from cumulo.spec.model import ModelSpec


class MtpHead(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, served: ModelSpec, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        moe = None if served.moe is None else replace(served.moe, dense_layers=())
        self.spec, self.dtype = replace(served, layers=1, moe=moe), dtype
        hidden, eps = served.hidden, served.norm_eps
        self.token_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.stream_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.joined = Linear(2 * hidden, hidden, dtype=dtype, device="cpu")
        self.layer = Layer(self.spec, 0, dtype=dtype, device="cpu")
        self.final_norm = RMSNorm(hidden, eps, dtype=dtype, device="cpu")
        self.head = Linear(hidden, served.vocab_size, dtype=dtype, device="cpu")
        self.rotary = RotaryTable(self.spec, dtype)
        self.token_of = torch.arange(served.vocab_size)

    def fc(self, stream: Tensor) -> Tensor:
        """The model's last hidden states are taken as they are."""
        return stream

    def forward(self, stream: Tensor, tokens: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The module's stream [R, hidden] at `batch.logit_rows`, from hidden states and embedded tokens."""
        # As serving engines do: at the first place there is nothing to see of a token.
        tokens = tokens * (batch.positions > 0)[:, None]
        both = torch.cat((self.token_norm(tokens), self.stream_norm(stream)), dim=-1)
        rotation = self.rotary.rotation_at(batch.positions)
        return self.layer(self.joined(both), rotation, batch, cache)[batch.logit_rows]

    def logits(self, stream: Tensor) -> Tensor:
        return self.head(self.final_norm(stream))

    @property
    def weight_bytes(self) -> int:
        return sum(one.nbytes for one in self.parameters())


_BLOCK = (128, 128)  # rows and columns that share a scale in DeepSeek's fp8


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
    with FolderTensors(tensors) as files, torch.no_grad():
        for one in placements:
            one.region(parameters[one.target]).copy_(_read(one.source, tensors, files))
    return head


def _read(name: str, tensors: dict[str, FileTensor], files: FolderTensors) -> Tensor:
    tensor, scales = files.read(name), f"{name}_scale_inv"
    if scales in tensors:
        return Float8Matrix(tensor, files.read(scales).float(), _BLOCK).dequantise()
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ModelError(
            f"{tensors[name].file} has {name} in {tensor.dtype}: 16 or 32 bits, or DeepSeek's fp8"
        )
    return tensor

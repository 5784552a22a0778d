"""ParameterReader: a model's parameters one at a time, from any file format, as plain float32 numbers. For whoever
goes through a model that need not fit into memory: `cumulo quantize`.
"""

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.files.hub import resolve
from cumulo.models.files.load import ModelFiles, model_files, open_weights
from cumulo.models.files.placement import PlacedPart, placed_parts
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.spec.counting import parameter_shapes


class ParameterReader:
    """Headers are checked when it is made; weights are read when they are asked for."""

    def __init__(self, model: str | Path | None) -> None:
        source = resolve(model)
        self._weights = open_weights(source)
        self.files: ModelFiles = model_files(source, self._weights)
        if self.files.quantisation is not None:
            raise ModelError(
                f"{self.files.path} is quantized already ({self.files.quantisation.in_words}); use the original "
                "model"
            )
        self.spec = self.files.spec
        self._shapes = parameter_shapes(self.spec)
        self._parts: dict[str, list[PlacedPart]] = defaultdict(list)
        for part in placed_parts(self._weights.placements, None):
            self._parts[part.target].append(part)

    @property
    def is_folder(self) -> bool:
        return self.files.format == "safetensors"

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit type the weights are stored in, or would be: quantised GGUF blocks are closer in float16."""
        types = self.files.tensor_types
        return torch.bfloat16 if types.get("BF16", 0) > types.get("F16", 0) else torch.float16

    def read(self, name: str) -> Tensor:
        """A whole parameter of the decoder, such as layers.3.attention.qkv.weight, rounded to 16 bits."""
        parameter = torch.empty(self._shapes[name], dtype=torch.float32)
        for part in self._parts[name]:
            part.fill(parameter, self._weights.plain(part))
        rounded = parameter.to(self.half_dtype).float()
        if bool(rounded.isinf().any()):
            raise ModelError(
                f"{self.files.path}: {name} has weights that 16 bits cannot hold; it cannot be quantized"
            )
        return rounded

    def tokenizer(self) -> Tokenizer:
        return self._weights.tokenizer()

"""ParameterReader: a model's parameters one at a time, from any file format, as plain float32 numbers. For whoever
goes through a model that need not fit into memory: `cumulo quantize`.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.files import names_gguf, names_huggingface
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.load import ModelFiles, inspect_model
from cumulo.models.files.placement import PlacedPart, placed_parts
from cumulo.models.files.safetensors_file import FolderTensors, check_types, read_directory
from cumulo.models.files.weights_gguf import plain_part
from cumulo.models.text.tokenizer import Tokenizer, load_tokenizer
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from cumulo.spec.counting import parameter_shapes


class ParameterReader:
    """Headers are checked when it is made; weights are read when they are asked for."""

    def __init__(self, model: str | Path | None) -> None:
        self.files: ModelFiles = inspect_model(model)
        if self.files.quantisation is not None:
            raise ModelError(
                f"{self.files.path} is quantized already ({self.files.quantisation.in_words}); use the original "
                "model"
            )
        self.spec = self.files.spec
        self._shapes = parameter_shapes(self.spec)
        self._parts: dict[str, list[PlacedPart]] = defaultdict(list)
        self._tensor: Callable[[PlacedPart], Tensor]
        if self.files.format == "gguf":
            self._open_gguf()
        else:
            self._open_folder()

    @property
    def is_folder(self) -> bool:
        return self.files.format == "safetensors"

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16-bit type the weights are stored in, or would be: quantised GGUF blocks are closer in float16."""
        types = self.files.tensor_types
        return torch.bfloat16 if types.get("BF16", 0) > types.get("F16", 0) else torch.float16

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._parts if name.startswith(prefix)]

    def read(self, name: str) -> Tensor:
        """A whole parameter of the decoder, such as layers.3.attention.qkv.weight, rounded to 16 bits."""
        parameter = torch.empty(self._shapes[name], dtype=torch.float32)
        for part in self._parts[name]:
            part.fill(parameter, self._tensor(part))
        rounded = parameter.to(self.half_dtype).float()
        if bool(rounded.isinf().any()):
            raise ModelError(
                f"{self.files.path}: {name} has weights that 16 bits cannot hold; it cannot be quantized"
            )
        return rounded

    def tokenizer(self) -> Tokenizer:
        if self.is_folder:
            return load_tokenizer(self.files.path)
        return tokenizer_from_gguf(open_gguf(self.files.path).metadata)

    def _open_gguf(self) -> None:
        file = open_gguf(self.files.path)
        for part in placed_parts(names_gguf.placements(self.spec, file.tensors), None):
            self._parts[part.target].append(part)

        def tensor(part: PlacedPart) -> Tensor:
            order = names_gguf.row_order(file.architecture, self.spec, part.source)
            return plain_part(file.tensors[part.source], order, part)

        self._tensor = tensor

    def _open_folder(self) -> None:
        tensors = read_directory(self.files.path)
        placements = names_huggingface.placements(self.spec)
        check_types(self.files.path, [one.source for one in placements], tensors)
        for part in placed_parts(placements, None):
            self._parts[part.target].append(part)

        files = FolderTensors(tensors)
        self._tensor = lambda part: files.read(part.source)

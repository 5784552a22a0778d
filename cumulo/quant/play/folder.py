"""What stands in a written folder next to the layers: configuration, tokenizer, embedding and head, the index."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import read_json, write_json
from cumulo.models.files.parameter_reader import ParameterReader
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import Float8Matrix, QuantisedMatrix
from cumulo.models.files.weights_safetensors import INDEX_NAME
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.quant.decide.file_config import quantization_config
from cumulo.quant.decide.matrices import plain_modules
from cumulo.quant.decide.recipe import Recipe
from cumulo.spec.to_huggingface import config_from_spec

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "added_tokens.json",
)  # fmt: skip


def stored_tensors(matrix: QuantisedMatrix, recipe: Recipe) -> dict[str, Tensor]:
    """A matrix in the folder's format, under short names."""
    if isinstance(matrix, Float8Matrix):
        return compressed_tensors.write_float8(matrix, recipe.scheme == "tensor", recipe.format == "fp8")
    if recipe.format == "awq":
        return awq.write(matrix)
    if recipe.format == "gptq":
        return gptq.write(matrix)
    if recipe.method == "int8":
        return compressed_tensors.write_int8(matrix)
    return compressed_tensors.write_packed(matrix, bool(recipe.symmetric))


def other_tensors(reader: ParameterReader) -> dict[str, Tensor]:
    """Embedding, final norm and head, in 16 bits."""
    return {
        one.source: reader.read(one.target).to(reader.half_dtype)
        for one in names_huggingface.placements(reader.spec)
        if not one.target.startswith("layers.")
    }


def write_folder(folder: Path, files: list[str], reader: ParameterReader, recipe: Recipe) -> None:
    """Rename the weight files as readers want them and write the rest."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file).replace(folder / name)
        with safe_open(folder / name, framework="pt") as handle:
            weight_map |= dict.fromkeys(handle.keys(), name)
        total += (folder / name).stat().st_size
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", _config(reader, recipe))
    if reader.is_folder:
        for name in _COPIED:
            if (reader.files.path / name).is_file():
                shutil.copyfile(reader.files.path / name, folder / name)
    else:
        write_tokenizer(folder, reader.tokenizer())
        ends = list(reader.spec.eos_token_ids)
        write_json(folder / "generation_config.json", {"eos_token_id": ends} if ends else {})


def _config(reader: ParameterReader, recipe: Recipe) -> dict[str, Any]:
    dtype = str(reader.half_dtype).removeprefix("torch.")
    config: dict[str, Any] = {}
    if reader.is_folder:
        config = {**read_json(reader.files.path / "config.json"), "dtype": dtype}
        config.pop("torch_dtype", None)
    else:
        config = config_from_spec(replace(reader.spec, dtype=dtype))
    linear = (
        one.source.removesuffix(".weight")
        for one in names_huggingface.placements(reader.spec)
        if len(one.shape) == 2 and one.target != "embed.weight"
    )
    plain = plain_modules(linear, recipe.layers)
    return config | {"quantization_config": quantization_config(recipe, reader.spec, plain)}


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """A tokenizer that came with a GGUF file, as the files of a Hugging Face folder."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", fields | tokenizer.special_texts)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template.source, "utf-8")

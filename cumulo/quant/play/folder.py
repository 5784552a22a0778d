"""The folder of a quantised model: what stands in it next to the layers (configuration, tokenizer, embedding and
head, the index), and WorkFolder, an unfinished run on disk next to its result. What is finished is kept and checked
when a run resumes; at the end the work folder becomes the result.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cumulo.base.files import write_whole
from cumulo.errors import ConfigError
from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import read_json, write_json
from cumulo.models.files.parameter_reader import ParameterReader
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import Float8Matrix, QuantisedMatrix
from cumulo.models.files.safetensors_file import INDEX_NAME
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.quant.decide.recipe import Recipe, plain_modules, quantization_config
from cumulo.spec.to_huggingface import config_from_spec

SUFFIX = ".quantizing"
_STATE = "state.json"


class WorkFolder:
    def __init__(self, output: Path, run: Mapping[str, Any]) -> None:
        """`run` says what is being made: a folder of another run is refused, not overwritten."""
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"{output} exists already; choose another --out, or remove it")
        self.output, self.path = output, output.with_name(output.name + SUFFIX)
        self._run = json.loads(json.dumps(run))
        self._files: dict[str, str] = {}  # finished file: sha256
        self.finished_layers = 0
        self._resume()

    def _resume(self) -> None:
        try:
            state = json.loads((self.path / _STATE).read_text("utf-8"))
        except FileNotFoundError:
            self._begin()
            return
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path / _STATE} cannot be read; remove the folder to start anew"
            ) from error
        if state.get("run") != self._run:
            raise ConfigError(
                f"{self.path} is an unfinished run with other options or of another model; repeat its options, or "
                "remove the folder"
            )
        self._files = dict(state["files"])
        damaged = [name for name, digest in self._files.items() if _hash(self.path / name) != digest]
        if damaged:
            self._begin()  # hidden states of an earlier layer are gone: nothing can be computed from the middle
            return
        self.finished_layers = int(state["finished_layers"])

    def _begin(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror or error}") from error
        self._files, self.finished_layers = {}, 0
        self._write_state()

    def finish_layer(self, tensors: Mapping[str, Tensor], hidden: Tensor | None) -> None:
        """Keep a layer's tensors and what the next layer reads."""
        done, before = self.finished_layers, self._hidden_name(self.finished_layers)
        self._keep(self.layer_name(done), tensors)
        if hidden is not None:
            self._keep(self._hidden_name(done + 1), {"hidden": hidden})
            self._files.pop(before, None)
        self.finished_layers = done + 1
        self._write_state()
        (self.path / before).unlink(missing_ok=True)

    def hidden(self) -> Tensor:
        return load_file(self.path / self._hidden_name(self.finished_layers))["hidden"]

    def add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._keep(name, tensors)

    def finish(self) -> None:
        """The folder becomes the result."""
        for file in (self.path / _STATE, *self.path.glob("hidden-*")):
            file.unlink(missing_ok=True)
        if self.output.is_dir():
            self.output.rmdir()  # empty
        self.path.replace(self.output)

    @staticmethod
    def layer_name(layer: int) -> str:
        return f"layer-{layer:05d}.safetensors"

    @staticmethod
    def _hidden_name(layer: int) -> str:
        return f"hidden-{layer:05d}.safetensors"

    def _keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        aside = self.path / f"{name}.writing"
        try:
            save_file(
                {key: one.contiguous() for key, one in tensors.items()}, aside, metadata={"format": "pt"}
            )
        except Exception as error:  # the format's library raises its own kinds, also for a full disk
            raise ConfigError(f"cannot write {aside}: {error}") from error
        aside.chmod(0o644)  # the library makes files that only their owner reads
        digest = _hash(aside)
        assert digest is not None
        aside.replace(self.path / name)
        self._files[name] = digest

    def _write_state(self) -> None:
        state = {"run": self._run, "finished_layers": self.finished_layers, "files": self._files}
        write_whole(self.path / _STATE, json.dumps(state, indent=1).encode())


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def fingerprint(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.to(torch.int64).numpy().tobytes()).hexdigest()


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

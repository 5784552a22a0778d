"""quantise: a model to a quantised Hugging Face folder, layer by layer. Called by `cumulo quantize`.

In memory are one layer, the hidden states of the calibration text, and for a moment the embedding. A layer reads
what the layers before it, already quantised, make of the text. After a kill the next run with the same options goes
on behind the last finished layer.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulo.base.reference_text import reference_text
from cumulo.errors import ConfigError
from cumulo.models.files.parameter_reader import ParameterReader
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.quant.decide.recipe import Recipe, settled
from cumulo.quant.play.folder import WorkFolder, fingerprint, other_tensors, stored_tensors, write_folder
from cumulo.quant.play.layer import CalibratedLayer
from cumulo.quant.play.methods import quantise_layer

LEAST_TOKENS = 256


def calibration_text(file: Path | None) -> str:
    """Of a text file, or of the `text` (or the messages' contents) of each line of a .jsonl file."""
    if file is None:
        return reference_text("calibration")
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the calibration file {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the calibration file {file} is not UTF-8 text (byte {error.start})") from error
    if file.suffix == ".jsonl":
        text = "\n\n".join(
            _line_text(line, file, number) for number, line in enumerate(text.splitlines(), 1) if line
        )
    if not text.strip():
        raise ConfigError(f"the calibration file {file} contains no text")
    return text


def _line_text(line: str, file: Path, number: int) -> str:
    try:
        entry = json.loads(line)
        if isinstance(entry.get("text"), str):
            return str(entry["text"])
        return "\n".join(str(message["content"]) for message in entry["messages"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}, line {number}: expected an object with `text`, or with `messages` that have `content`"
        ) from error


def calibration_tokens(tokenizer: Tokenizer, text: str, sequences: int, length: int) -> Tensor:
    """[sequences, length], spread evenly over the text; fewer sequences where it is short."""
    tokens = tokenizer.encode(text, parse_special_tokens=False)
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens; give at least {LEAST_TOKENS:,}, better some thousands"
        )
    length = min(length, len(tokens))
    sequences = max(1, min(sequences, len(tokens) // length))
    step = (len(tokens) - length) // max(1, sequences - 1) if sequences > 1 else 0
    return torch.tensor([tokens[step * index : step * index + length] for index in range(sequences)])


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    file: Path | None = None  # None: the default text
    sequences: int = 64
    length: int = 512


@dataclass(frozen=True, slots=True)
class QuantiseReport:
    """What a run made."""

    folder: Path
    recipe: Recipe
    resumed_at: int  # layers that an earlier run had finished
    weight_bytes: int
    source_bytes: int  # of the same weights in 16 bits
    calibration_tokens: int


def quantise(
    model: str | Path | None,
    output: Path,
    recipe: Recipe,
    calibration: Calibration = Calibration(),
    progress: Progress | None = None,
) -> QuantiseReport:
    """Everything that can be refused is refused before a weight is read."""
    tell = progress or (lambda stage, done, total: None)
    reader = ParameterReader(model)
    recipe = settled(recipe, reader.spec)
    layers = reader.spec.layers
    quantised_layers = recipe.layers or layers
    tokens: Tensor | None = None
    if recipe.needs_calibration:
        tell("reading the calibration text", 0, layers)
        text = calibration_text(calibration.file)
        length = min(calibration.length, reader.spec.max_context)
        tokens = calibration_tokens(reader.tokenizer(), text, calibration.sequences, length)
    elif calibration.file is not None:
        raise ConfigError(f"--method {recipe.method} does not use a calibration text; omit --calibration")
    work = WorkFolder(output, _run(reader, recipe, tokens))
    begun = work.finished_layers
    with torch.no_grad():
        hidden = _hidden(reader, tokens, work)
        for index in range(begun, layers):
            name = f"layer {index + 1} of {layers}"
            tell(name, index, layers)
            layer = CalibratedLayer(reader, index)
            found = {}
            if index < quantised_layers:

                def show(what: str, name: str = name, index: int = index) -> None:
                    tell(f"{name}: {what}", index, layers)

                found = quantise_layer(layer, recipe, hidden, reader.half_dtype, show)
            tensors = {
                f"{module}.{short}": tensor
                for module, matrix in found.items()
                for short, tensor in stored_tensors(matrix, recipe).items()
            }
            for placement in layer.placements:
                if placement.source.removesuffix(".weight") not in found:
                    tensors[placement.source] = layer.weight(placement).to(reader.half_dtype)
            if hidden is not None and index + 1 < quantised_layers:
                layer.run(hidden, into=hidden)
            work.finish_layer(tensors, hidden)
        tell("embedding and head", layers, layers)
        work.add("rest.safetensors", other_tensors(reader))
    files = [*(work.layer_name(index) for index in range(layers)), "rest.safetensors"]
    weight_bytes = sum((work.path / file).stat().st_size for file in files)
    write_folder(work.path, files, reader, recipe)
    work.finish()
    return QuantiseReport(
        output,
        recipe,
        begun,
        weight_bytes,
        2 * reader.files.parameters,
        0 if tokens is None else tokens.numel(),
    )


def _hidden(reader: ParameterReader, tokens: Tensor | None, work: WorkFolder) -> Tensor | None:
    """What the next layer reads, [sequences, tokens, hidden]."""
    if tokens is None:
        return None
    if work.finished_layers:
        return work.hidden()
    return reader.read("embed.weight")[tokens]


def _run(reader: ParameterReader, recipe: Recipe, tokens: Tensor | None) -> dict[str, Any]:
    """What identifies a run: a resumed one must be the same in all of it."""
    return {
        "model": str(reader.files.path.resolve()),
        "weight_bytes": reader.files.weight_bytes,
        "recipe": asdict(recipe),
        "tokens": None if tokens is None else fingerprint(tokens),
    }

"""The one way to models: `load_model` gives a decoder with weights and its tokenizer, whatever the format;
`inspect_model` reads only headers, for the memory ledger and `cumulo doctor`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from cumulo.errors import ModelError
from cumulo.layout.serving import HeldParameter, RankPart, held_parameters
from cumulo.models.decoder import Decoder
from cumulo.models.files import names_gguf
from cumulo.models.files.gguf_blocks import held_bytes, is_quantised
from cumulo.models.files.gguf_file import GGUFFile, open_gguf
from cumulo.models.files.hub import ModelSource, resolve
from cumulo.models.files.json_file import in_vocabulary, read_json, shown
from cumulo.models.files.placement import check_tensors
from cumulo.models.files.weights_gguf import load_gguf
from cumulo.models.files.weights_safetensors import Progress, check_folder, load_safetensors
from cumulo.models.play.rank_decoder import empty_rank_decoder, leave_biases_to_one
from cumulo.models.text.tokenizer import Tokenizer, load_tokenizer
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from cumulo.spec.quantisation import Quantisation, quantisation_from_config

# Fields of a generation config that are sampling parameters of ours, and what GGUF calls them.
_SAMPLING_FIELDS = {
    "temperature": (0, 100), "top_k": (0, 1 << 31), "top_p": (1e-6, 1), "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}  # fmt: skip
_GGUF_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model's headers tell, before a weight is read."""

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    spec: ModelSpec
    parameters: int
    weight_bytes: int  # as stored
    quantised_parameters: int = 0  # of `parameters`, those stored in quantised blocks,
    quantised_bytes: int = 0  # and the bytes these take in memory if they stay so
    tensor_types: Mapping[str, int] = field(default_factory=dict)  # how many tensors are stored as what
    quantisation: Quantisation | None = None  # of a Hugging Face folder


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    name: str
    source_path: Path
    format: Literal["safetensors", "gguf"]
    spec: ModelSpec
    decoder: Decoder
    tokenizer: Tokenizer | None  # None only when loaded without one
    quantised: bool  # whether matrices are kept as the file has them
    generation_defaults: Mapping[str, Any]  # sampling parameters the model's authors recommend

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, whether the tokenizer or the configuration says so."""
        ends = (*(self.tokenizer.eos_ids if self.tokenizer else ()), *self.spec.eos_token_ids)
        return tuple(dict.fromkeys(ends))


def load_model(
    model: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keep_quantised: bool = True,
    with_tokenizer: bool = True,
    progress: Progress | None = None,
    part: RankPart | None = None,
) -> LoadedModel:
    """Load a model: None (the built-in one), a folder, a .gguf file or a Hugging Face name.

    `dtype` is what the decoder computes in and what plain weights are stored as. `keep_quantised` keeps
    quantised matrices as the file has them; packed kernels exist for float32 on CPUs, so elsewhere they are
    dequantised. `progress(done_bytes, total_bytes)` is called as weights arrive. The tokenizer is made first:
    it is quick, and a file that cannot be talked to is better refused before its weights are read. `part`: only
    what one rank holds is allocated and read; its decoder has the rank's own spec.
    """
    source = resolve(model)
    packable = torch.device(device).type == "cpu" and dtype == torch.float32
    # Headers are checked against the spec before the decoder is allocated: a damaged size must not decide
    # how much memory is asked for.
    if source.format == "gguf":
        file, headers = _gguf_headers(source)
        tokenizer = tokenizer_from_gguf(file.metadata) if with_tokenizer else None
        keep_quantised &= packable and headers.quantised_parameters > 0
        found = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _GGUF_SAMPLING.items()}
        defaults = _sampling_defaults(found, file.path)
        _check_ends(tokenizer, headers)
        # Most matrices will be packed: memory for plain ones would be touched and given back.
        decoder, held = _empty_decoder(headers.spec, dtype, "meta" if keep_quantised else device, part)
        load_gguf(file, decoder, headers.spec, keep_quantised, progress, held)
    else:
        headers = _folder_headers(source)
        tokenizer = load_tokenizer(source.path) if with_tokenizer else None
        keep_quantised &= packable and headers.quantised_parameters > 0
        generation = source.path / "generation_config.json"
        defaults = _sampling_defaults(read_json(generation), generation)
        _check_ends(tokenizer, headers)
        decoder, held = _empty_decoder(headers.spec, dtype, device, part)
        how = headers.quantisation
        load_safetensors(source.path, decoder, headers.spec, progress, held, how, keep_quantised)
    if part is not None:
        leave_biases_to_one(decoder, part)
    return LoadedModel(
        name=source.name,
        source_path=source.path,
        format=source.format,
        spec=headers.spec,
        decoder=decoder,
        tokenizer=tokenizer,
        quantised=keep_quantised,
        generation_defaults={**source.sampling, **defaults},
    )


def _empty_decoder(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, part: RankPart | None
) -> tuple[Decoder, dict[str, HeldParameter] | None]:
    if part is None:
        return Decoder(spec, dtype, device), None
    return empty_rank_decoder(part, dtype, device), held_parameters(part)


def _check_ends(tokenizer: Tokenizer | None, headers: ModelFiles) -> None:
    """What ends an answer must be a row of the embedding: the sampler looks it up there."""
    ends = tokenizer.eos_ids if tokenizer is not None else ()
    in_vocabulary(ends, f"{headers.path}: what ends an answer", headers.spec.vocab_size)


def inspect_model(model: str | Path | None = None) -> ModelFiles:
    """Read headers only; a damaged, incomplete or unknown model is refused here already."""
    source = resolve(model)
    return _gguf_headers(source)[1] if source.format == "gguf" else _folder_headers(source)


def _gguf_headers(source: ModelSource) -> tuple[GGUFFile, ModelFiles]:
    file = open_gguf(source.path)
    try:
        spec = names_gguf.spec_of(file)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    placements = names_gguf.placements(spec, file.tensors)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    check_tensors(str(file.path), placements, shapes, lambda name: names_gguf.ignorable(name, file.tensors))
    used = [file.tensors[placement.source] for placement in placements]
    quantised = [tensor for tensor in used if is_quantised(tensor)]
    return file, ModelFiles(
        source.name,
        source.path,
        "gguf",
        spec,
        parameters=sum(placement.elements for placement in placements),
        weight_bytes=sum(tensor.nbytes for tensor in used),
        quantised_parameters=sum(tensor.rows * tensor.columns for tensor in quantised),
        quantised_bytes=sum(map(held_bytes, quantised)),
        tensor_types=Counter(tensor.type_name for tensor in used),
    )


def _folder_headers(source: ModelSource) -> ModelFiles:
    folder = source.path
    config = read_json(folder / "config.json")
    if not config:
        raise ModelError(f"{folder} has no config.json, or an empty one; download the model again")
    try:
        spec = spec_from_config(config)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    how = quantisation_from_config(config)
    checked = check_folder(folder, spec, how)
    names = [name for placement in checked.placements for name in checked.sources(placement)]
    types = Counter(checked.tensors[name].dtype for name in names if name not in checked.matrices)
    return ModelFiles(
        source.name,
        folder,
        "safetensors",
        spec,
        parameters=sum(placement.elements for placement in checked.placements),
        weight_bytes=sum(checked.tensors[name].nbytes for name in names),
        quantised_parameters=sum(matrix.placement.elements for matrix in checked.packed),
        quantised_bytes=checked.packed_bytes,
        tensor_types=types if how is None else {how.in_words: len(checked.matrices), **types},
        quantisation=how,
    )


def _sampling_defaults(fields: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """What may be handed to SamplingParams; `do_sample: false` means greedy."""
    found = {
        name: fields[name]
        for name in _SAMPLING_FIELDS
        if isinstance(fields.get(name), (int, float)) and not isinstance(fields[name], bool)
    }
    for name, value in found.items():
        least, most = _SAMPLING_FIELDS[name]
        if not least <= value <= most or (name == "top_k" and value != int(value)):
            raise ModelError(
                f"{where} recommends {name} {shown(value)}, which must be {least:g} to {most:g}; correct the file"
            )
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    if fields.get("do_sample") is False:
        found["temperature"] = 0.0
    return found

"""The one way to models: `load_model` gives a decoder with weights and its tokenizer, whatever the format;
`inspect_model` reads only headers, for the memory ledger and `cumulo doctor`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from cumulo.errors import ModelError
from cumulo.layout.serving import RankPart, held_parameters
from cumulo.models.decoder import Decoder
from cumulo.models.files import names_gguf
from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import ModelSource, resolve
from cumulo.models.files.json_file import in_vocabulary, read_json, shown
from cumulo.models.files.weights import Progress, fill_decoder
from cumulo.models.files.weights_gguf import GgufWeights
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.models.play.rank_decoder import empty_rank_decoder, leave_biases_to_one
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from cumulo.spec.quantisation import Quantisation, quantisation_from_config

# Fields of a generation config that are sampling parameters of ours, and their bounds.
_SAMPLING_FIELDS = {
    "temperature": (0, 100), "top_k": (0, 1 << 31), "top_p": (1e-6, 1), "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
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

    @property
    def number_format(self) -> str:
        """How most of the weights are stored, as their format calls it: Q4_K, BF16, awq."""
        if self.quantisation is not None:
            return self.quantisation.format
        types = {
            name: count for name, count in self.tensor_types.items() if name != "F32"
        } or self.tensor_types
        return max(types, key=lambda name: types[name], default="")


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
    # Headers are checked against the spec before the decoder is allocated: a damaged size must not decide
    # how much memory is asked for.
    weights = open_weights(source)
    spec = weights.spec
    tokenizer = weights.tokenizer() if with_tokenizer else None
    packable = torch.device(device).type == "cpu" and dtype == torch.float32
    keep_quantised &= packable and weights.quantised_parameters > 0
    defaults = _sampling_defaults(weights.recommended_sampling(), weights.path)
    # What ends an answer must be a row of the embedding: the sampler looks it up there.
    ends = tokenizer.eos_ids if tokenizer is not None else ()
    in_vocabulary(ends, f"{source.path}: what ends an answer", spec.vocab_size)
    # Most matrices will be packed: memory for plain ones would be touched and given back.
    place = "meta" if keep_quantised else device
    if part is None:
        decoder = Decoder(spec, dtype, place)
        fill_decoder(decoder, weights, keep_quantised, progress)
    else:
        decoder = empty_rank_decoder(part, dtype, place)
        fill_decoder(decoder, weights, keep_quantised, progress, held_parameters(part))
        leave_biases_to_one(decoder, part)
    return LoadedModel(
        name=source.name,
        source_path=source.path,
        format=source.format,
        spec=spec,
        decoder=decoder,
        tokenizer=tokenizer,
        quantised=keep_quantised,
        generation_defaults={**source.sampling, **defaults},
    )


def inspect_model(model: str | Path | None = None) -> ModelFiles:
    """Read headers only; a damaged, incomplete or unknown model is refused here already."""
    source = resolve(model)
    return model_files(source, open_weights(source))


def model_files(source: ModelSource, weights: GgufWeights | FolderWeights) -> ModelFiles:
    return ModelFiles(
        source.name,
        source.path,
        source.format,
        weights.spec,
        parameters=sum(placement.elements for placement in weights.placements),
        weight_bytes=sum(map(weights.nbytes, weights.placements)),
        quantised_parameters=weights.quantised_parameters,
        quantised_bytes=weights.quantised_bytes,
        tensor_types=weights.tensor_types,
        quantisation=weights.how if isinstance(weights, FolderWeights) else None,
    )


def open_weights(source: ModelSource) -> GgufWeights | FolderWeights:
    """Read headers only, and check them against the model's spec."""
    if source.format == "gguf":
        file = open_gguf(source.path)
        return GgufWeights(file, _spec_in(file.path, lambda: names_gguf.spec_of(file)))
    path = source.path / "config.json"
    config = read_json(path)
    if not config:
        raise ModelError(f"{source.path} has no config.json, or an empty one; download the model again")
    spec = _spec_in(path, lambda: spec_from_config(config))
    return FolderWeights(source.path, spec, quantisation_from_config(config))


def _spec_in(path: Path, read: Callable[[], ModelSpec]) -> ModelSpec:
    try:
        return read()
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


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

"""Reads an adapter's folder as PEFT and `cumulo train` write it. Called by the engine, for a start or while it
serves.

The folder is somebody else's: its header is checked against the model before a number is read, and what does not
belong to a low-rank adapter of this model is refused by name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ModelError
from cumulo.layout.pieces import SERVED_SECTIONS
from cumulo.layout.serving import RankPart, held_parameters
from cumulo.models.adapters.config import (
    AdapterConfig,
    read_config,
)
from cumulo.models.files.names_huggingface import placements
from cumulo.models.files.placement import placed_parts
from cumulo.models.files.safetensors_file import FileTensor, read_header
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class AdapterSection:
    """Rows [start, stop) of a matrix of the decoder: rows `own_rows` and columns `own_columns` of a file's
    matrix."""

    source: str  # the file's module, such as model.layers.0.self_attn.q_proj
    start: int
    stop: int
    own_rows: slice
    own_columns: slice
    whole: tuple[int, int]  # outputs and inputs of the file's matrix


@dataclass(frozen=True, slots=True)
class AdaptableMatrix:
    """A matrix of the decoder that adapters can change."""

    name: str  # of the module in the decoder, such as layers.0.attention.qkv
    outputs: int
    inputs: int
    sections: tuple[AdapterSection, ...]  # in the order of their rows


def adaptable_matrices(spec: ModelSpec, part: RankPart | None = None) -> tuple[AdaptableMatrix, ...]:
    """Of a whole decoder or, by `part`, of a rank's."""
    found: dict[str, list[AdapterSection]] = {}
    inputs: dict[str, int] = {}
    held = None if part is None else held_parameters(part)
    wanted = [one for one in placements(spec) if is_adaptable(one.target)]
    for one in placed_parts(wanted, held):
        (rows, columns), (into, across) = one.source_slices, one.target_slices
        module = one.target.removesuffix(".weight")
        section = AdapterSection(
            one.source.removesuffix(".weight"),
            into.start,
            into.stop,
            rows,
            columns,
            (one.placement.shape[0], one.placement.shape[1]),
        )
        found.setdefault(module, []).append(section)
        inputs[module] = across.stop - across.start
    return tuple(
        AdaptableMatrix(
            name,
            max(section.stop for section in sections),
            inputs[name],
            tuple(sorted(sections, key=lambda section: section.start)),
        )
        for name, sections in found.items()
    )


def is_adaptable(target: str) -> bool:
    """Whether adapters of a parameter of the decoder can be served. Latent attention absorbs kv_b into its queries;
    routed experts, routers, embedding and head are served as they are."""
    return (
        target.startswith("layers.")
        and target.endswith(".weight")
        and ".experts." not in target
        and not target.endswith(("router.weight", "kv_b.weight"))
        and target.split(".")[-2] in SERVED_SECTIONS
    )


WEIGHTS_NAME = "adapter_model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """y += scale · B (A x), for one of the file's matrices."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter in host memory, in the file's own types."""

    folder: Path
    pairs: Mapping[str, LowRankPair]  # by the file's module
    fingerprint: str  # of all that decides its results: equal ones answer alike
    base_model: str | None = None

    @property
    def rank(self) -> int:
        """The greatest."""
        return max((pair.rank for pair in self.pairs.values()), default=0)


def read_adapter(folder: Path | str, spec: ModelSpec, max_rank: int) -> AdapterWeights:
    """An adapter of the whole model `spec`, checked; ModelError if it is not one, or of a higher rank."""
    folder = Path(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        has_old = (folder / "adapter_model.bin").exists()
        advice = " (only adapter_model.bin: save it as safetensors)" if has_old else ""
        raise ModelError(f"{folder} lacks {WEIGHTS_NAME}{advice}")
    header = read_header(path)
    ranks = _checked(path, header, config, spec, max_rank)
    pairs: dict[str, LowRankPair] = {}
    digest = blake2b(digest_size=16, person=b"cumulo-adapter")
    names = {(m["module"], m["side"]): name for name in header if (m := _NAME.fullmatch(name)) is not None}
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            for module in sorted(ranks):
                a, b = (handle.get_tensor(names[module, side]).clone() for side in "AB")
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise ModelError(
                        f"{path}: the adapter of {module} contains infinite or undefined numbers"
                    )
                pairs[module] = LowRankPair(a, b, config.scale_of(module))
                digest.update(f"{module} {a.dtype} {b.dtype} {pairs[module].scale!r}".encode())
                for tensor in (a, b):
                    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return AdapterWeights(folder, pairs, digest.hexdigest(), config.base_model)


def _checked(
    path: Path, header: Mapping[str, FileTensor], config: AdapterConfig, spec: ModelSpec, max_rank: int
) -> dict[str, int]:
    """The rank of every adapted module, once all tensors are known to be what they should."""
    known = {
        section.source: section.whole for matrix in adaptable_matrices(spec) for section in matrix.sections
    }
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, tensor in header.items():
        match = _NAME.fullmatch(name)
        if match is None:
            _refuse_tensor(path, name)
        module = match["module"]
        if module not in known:
            _refuse_module(path, module, spec, known)
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{path}: {name} has the type {tensor.dtype}; adapters are {', '.join(sorted(_FLOATS))}"
            )
        if len(tensor.shape) != 2 or (module, match["side"]) in shapes:
            raise ModelError(
                f"{path}: {name} is {list(tensor.shape)}, or there twice: it should be one matrix"
            )
        shapes[module, match["side"]] = tensor.shape
    if not shapes:
        raise ModelError(f"{path} contains no adapter: it has no tensors")
    ranks: dict[str, int] = {}
    for module in sorted({module for module, _ in shapes}):
        rank, (outputs, inputs) = config.rank_of(module), known[module]
        a, b = shapes.get((module, "A")), shapes.get((module, "B"))
        if a != (rank, inputs) or b != (outputs, rank):
            raise ModelError(
                f"{path}: the adapter of {module} is A {list(a or ())} and B {list(b or ())}, but the model and "
                f"rank {rank} want A [{rank}, {inputs}] and B [{outputs}, {rank}]: it belongs to another model, "
                "or its configuration to another adapter"
            )
        if rank > max_rank:
            raise ModelError(
                f"{path}: {module} has rank {rank}, and this engine has room for rank {max_rank}: start it with "
                f"--max-lora-rank {rank}"
            )
        if not math.isfinite(config.scale_of(module)):
            raise ModelError(f"{path}: the scale of {module} is not a number")
        ranks[module] = rank
    return ranks


def _refuse_tensor(path: Path, name: str) -> NoReturn:
    what = "an adapted embedding" if "embedding" in name else "which is no part of a plain LoRA adapter"
    what = "DoRA's magnitudes" if "lora_magnitude" in name else what
    raise ModelError(f"{path} contains {name[:200]!r}, {what}; it cannot be served")


def _refuse_module(
    path: Path, module: str, spec: ModelSpec, known: Mapping[str, tuple[int, int]]
) -> NoReturn:
    if any(module == one.source.removesuffix(".weight") for one in placements(spec)):
        raise ModelError(
            f"{path} adapts {module}, which cannot be served: adapters change the matrices of attention and plain "
            "feed-forward layers; embedding, head, routers, experts and kv_b_proj are served as they are"
        )
    hint = did_you_mean(module[:200], known, otherwise="")
    raise ModelError(
        f"{path} adapts {module[:200]!r}, which this model does not have{hint}; it belongs to another model"
    )

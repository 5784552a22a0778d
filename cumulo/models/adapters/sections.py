"""Which matrices of a decoder adapters can change, and where each of PEFT's matrices lies in them. Made once for a
decoder, or for a rank's part of one, from the same placements that its weights were loaded by.

The decoder fuses what files keep apart, so a matrix has *sections*: runs of its rows, each with an adapter of its
own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cumulo.layout.adapters import SERVED_SECTIONS
from cumulo.layout.serving import RankPart, held_parameters
from cumulo.models.files.names_huggingface import placements
from cumulo.models.files.placement import placed_parts
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
    wanted = [one for one in placements(spec) if why_not_adapted(one.target) is None]
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


def why_not_adapted(target: str) -> str | None:
    """Why adapters of a parameter of the decoder cannot be served; None: they can."""
    if not target.startswith("layers."):
        return "the embedding and the head are served as they are"
    if ".experts." in target:
        return "routed experts are served as they are"
    if target.endswith("router.weight"):
        return "the router of experts is served as it is"
    if target.endswith("kv_b.weight"):
        return "latent attention absorbs this matrix into its queries"
    if not target.endswith(".weight") or target.split(".")[-2] not in SERVED_SECTIONS:
        return "only the matrices of attention and feed-forward can be adapted"
    return None


def unadapted_modules(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """The file's modules that adapters could name and that cannot be served, each with why."""
    for one in placements(spec):
        if one.source.endswith(".weight") and (why := why_not_adapted(one.target)) is not None:
            yield one.source.removesuffix(".weight"), why

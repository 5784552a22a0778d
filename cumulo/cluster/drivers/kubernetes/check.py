"""Manifests checked without a cluster: schemas, references between objects, and fit with nodes, quotas and a plan.
`cumulo kubernetes check` runs it.

    problems = check_files([Path("manifests")])
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.cluster.drivers.kubernetes.fit import check_against_plan, check_fit, read_plan
from cumulo.cluster.drivers.kubernetes.manifest_source import (
    Manifest,
    ManifestProblem,
    manifest_files,
    read_manifests,
)
from cumulo.cluster.drivers.kubernetes.references import ObjectSet, check_references
from cumulo.cluster.drivers.kubernetes.schema_check import check_schema
from cumulo.cluster.drivers.kubernetes.schemas import SchemaBook, book_with, shipped_book

USUAL_NODE_GPUS = 8


def check_files(
    paths: Sequence[Path],
    *,
    crds: Path | None = None,
    node_gpus: int = USUAL_NODE_GPUS,
    exists: Iterable[str] = (),
    plan: Path | None = None,
) -> tuple[list[Manifest], list[ManifestProblem]]:
    """`plan`: what `cumulo plan serve --out` wrote, which the manifests are to carry out."""
    planned = None if plan is None else read_plan(plan)
    manifests = [one for path in manifest_files(list(paths)) for one in read_manifests(path)]
    check_manifests(manifests, book_with(crds), node_gpus, exists)
    if planned is not None:
        check_against_plan([one for one in manifests if one.body], planned, node_gpus)
    return manifests, [problem for one in manifests for problem in one.problems]


def check_bodies(
    bodies: Iterable[dict[str, Any]],
    file: str = "manifests",
    node_gpus: int = USUAL_NODE_GPUS,
    exists: Iterable[str] = (),
) -> list[ManifestProblem]:
    return check_manifests([Manifest(file, body) for body in bodies], shipped_book(), node_gpus, exists)


def check_manifests(
    manifests: Sequence[Manifest], book: SchemaBook, node_gpus: int, exists: Iterable[str] = ()
) -> list[ManifestProblem]:
    whole = [one for one in manifests if one.body]
    for one in whole:
        _check_one(one, book)
        one.sound = not one.problems
    check_together(whole, node_gpus, exists)
    return [problem for one in manifests for problem in one.problems]


def check_together(
    manifests: Sequence[Manifest], node_gpus: int, exists: Iterable[str] = ()
) -> list[ManifestProblem]:
    """References and fit, without schemas: what is also checked before manifests are written."""
    objects = ObjectSet(manifests, exists)
    check_references(objects)
    check_fit(objects, node_gpus)
    return [problem for one in manifests for problem in one.problems]


def _check_one(one: Manifest, book: SchemaBook) -> None:
    for name in ("apiVersion", "kind"):
        if not isinstance(one.body.get(name), str) or not one.body[name]:
            one.blame((name,), "is required and missing")
            return
    kind = book.find(one.api_version, one.kind)
    if kind is None:
        _blame_unknown(one, book)
        return
    check_schema(one, kind, book)
    if not one.name and one.kind != "Kustomization":
        one.blame(("metadata", "name"), "is required and missing")
    if not kind.namespaced and one.metadata.get("namespace"):
        one.blame(
            ("metadata", "namespace"), f"a {one.kind} belongs to the whole cluster: remove its namespace"
        )


def _blame_unknown(one: Manifest, book: SchemaBook) -> None:
    versions = book.versions_of(one.kind)
    if versions:
        close = nearest(one.api_version, versions)
        hint = f"; did you mean {close[0]}?" if close else f"; use {' or '.join(versions)}"
        one.blame(("apiVersion",), f"{one.kind} has no version {one.api_version}{hint}")
        return
    kinds = sorted({name for _, name in book.kinds})
    close = nearest(one.kind, kinds)
    known = f"; give its definition with --crds. Known: {', '.join(kinds)}"
    hint = f"; did you mean {close[0]}?" if close else known
    one.blame(("kind",), f"there is no schema for {one.kind} of {one.api_version}{hint}")

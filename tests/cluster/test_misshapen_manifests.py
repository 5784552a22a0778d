"""Every field of sound manifests, given a value of a wrong type: the check names it, and never fails itself."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.kubernetes.check import check_bodies
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, shown_path

FILES = sorted(Path(__file__).parent.glob("*_manifests.yaml"))
WRONG: dict[type, list[Any]] = {
    str: [{"a": 1}, [1]],
    int: [{"a": 1}, 1.5],
    dict: ["x", [1]],
    list: ["x", {"a": 1}, 5],
    bool: ["maybe", 3],
}
EVERY = 23  # which of the fields; a prime, so that each kind of field has its turn


def fields_of(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key), one
        yield from fields_of(one, (*path, key))


def with_value(body: Any, path: FieldPath, value: Any) -> Any:
    made: Any = copy.deepcopy(body)
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


def is_free(path: FieldPath, value: Any) -> bool:
    """Fields whose numbers may be quantities or shares, or that have no type of their own."""
    names = {str(step) for step in path}
    return isinstance(value, int) and bool(names & {"requests", "limits", "capability", "nominalQuota"})


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_wrong_type_is_named_at_its_field(file: Path, request: pytest.FixtureRequest) -> None:
    whole = list(yaml.safe_load_all(file.read_text("utf-8")))
    cases = [
        (number, path, value, wrong)
        for number, body in enumerate(whole)
        for path, value in fields_of(body)
        if path[0] not in ("apiVersion", "kind") and not is_free(path, value)
        for wrong in WRONG.get(type(value), ())
    ]
    step = 1 if request.config.getoption("--thorough") else EVERY
    for number, path, value, wrong in cases[::step]:
        bodies = [*whole[:number], with_value(whole[number], path, wrong), *whole[number + 1 :]]
        told = check_bodies(bodies)
        assert shown_path(path) in {one.path for one in told}, (
            path,
            value,
            wrong,
            [str(one) for one in told],
        )


def test_an_object_of_an_unknown_kind_with_fields_of_wrong_types_does_not_stop_the_check() -> None:
    pod = {"containers": [{"name": "a", "image": "b", "ports": 5, "resources": "x", "env": {"a": 1}}]}
    strange = {
        "apiVersion": "example.com/v1",
        "kind": "Notebook",
        "metadata": {"name": "n", "labels": "x"},
        "spec": {"template": {"spec": pod}},
    }
    assert [one.path for one in check_bodies([strange])] == ["kind"]

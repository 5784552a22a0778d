"""Manifests with one field broken, for the tests that want each break named at its field."""

import copy
from typing import Any

from cumulo.cluster.drivers.kubernetes.check import check_bodies

GONE = object()  # the value of a field that is taken away
# What is broken: kind and name, field, its new value; and the field that is blamed, with words of the message.
Break = tuple[str, str, Any, str, str]


def broken(whole: list[dict[str, Any]], subject: str, path: str, value: Any) -> list[dict[str, Any]]:
    bodies = copy.deepcopy(whole)
    kind, name = subject.split("/")
    place: Any = next(one for one in bodies if one["kind"] == kind and one["metadata"]["name"] == name)
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        place = place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return bodies


def plain(path: str) -> str:
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


def is_named_at_its_field(whole: list[dict[str, Any]], case: Break) -> None:
    subject, path, value, blamed, words = case
    problems = check_bodies(broken(whole, subject, path, value))
    told = [str(one) for one in problems]
    assert any(plain(one.path) == blamed and words in one.message for one in problems), told
    assert len(problems) <= 3, told

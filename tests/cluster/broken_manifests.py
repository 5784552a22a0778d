"""Manifests with one field broken, for the tests that want each break named at its field."""

import copy
from typing import Any

from cumulo.cluster.drivers.kubernetes.check import check_bodies

GONE = object()  # the value of a field that is taken away
# What is broken: kind and name, field, its new value; and the field that is blamed, with words of the message.
Break = tuple[str, str, Any, str, str]


def broken(whole: list[dict[str, Any]], subject: str, path: str, value: Any) -> list[dict[str, Any]]:
    """The manifests with another value in one field; the others are not copied."""
    kind, name = subject.split("/")
    bodies = list(whole)
    at = next(n for n, one in enumerate(bodies) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    place: Any = copy.deepcopy(bodies[at])
    bodies[at] = place
    *steps, last = steps_to(place, path)
    for step in steps:
        place = place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return bodies


def steps_to(body: Any, path: str) -> list[str | int]:
    """A field's place; a key may contain dots."""
    steps: list[str | int] = []
    words, here = path.split("."), body
    while words:
        if isinstance(here, list):
            step: str | int = int(words.pop(0))
        else:
            length = next(n for n in range(len(words), 0, -1) if n == 1 or ".".join(words[:n]) in here)
            step, words = ".".join(words[:length]), words[length:]
        steps.append(step)
        here = here[step] if words else None
    return steps


def plain(path: str) -> str:
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


def is_named_at_its_field(whole: list[dict[str, Any]], case: Break) -> None:
    subject, path, value, blamed, words = case
    problems = check_bodies(broken(whole, subject, path, value))
    told = [str(one) for one in problems]
    assert any(plain(one.path) == blamed and words in one.message for one in problems), told
    assert len(problems) <= 3, told

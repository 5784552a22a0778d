"""Conversations that a head learns from: tasks of many kinds, made by a small grammar (words.yaml). What the
answers say does not matter; a head has to see all the ways in which its model begins, lists, corrects, counts and
refuses.

Neither the prompts of `cumulo bench speculate` nor their forms are among them (a test compares).
"""

import random
import re
from dataclasses import dataclass

from cumulo.base.strict import package_yaml

_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class AskedTurns:
    turns: tuple[str, ...]  # a user's; the model answers each
    system: str | None = None


class Grammar:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = package_yaml("cumulo.train.head", "words.yaml")

    def conversations(self, count: int) -> list[AskedTurns]:
        """`count` conversations, all different, of all kinds in fixed shares."""
        kinds, shares = zip(*self._words["kinds"].items(), strict=True)
        found: dict[AskedTurns, None] = {}
        tries = 0
        while len(found) < count and tries < 4 * count + 1000:
            first = self._filled(self._random.choices(kinds, shares)[0])
            turns = (first, self._one("follow_ups")) if self._random.random() < 0.12 else (first,)
            found[AskedTurns(turns, self._one("systems") if self._random.random() < 0.1 else None)] = None
            tries += 1
        return list(found)[:count]

    def _one(self, name: str) -> str:
        """One of a list's forms, filled."""
        return self._filled(str(self._random.choice(self._words[name])))

    def _filled(self, form: str) -> str:
        return _PLACE.sub(lambda place: self._one(place[1]), form)

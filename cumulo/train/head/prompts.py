"""Conversations that a head learns from: tasks of many kinds, made by a small grammar. What the answers say does
not matter; a head has to see all the ways in which its model begins, lists, corrects, counts and refuses.

Neither the prompts of `cumulo bench speculate` nor their forms are among them (a test compares).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from cumulo.base.strict import package_yaml


def _words() -> dict[str, list[str]]:
    """What conversations are made of: forms with places to fill, and what fills them."""
    found: dict[str, list[str]] = package_yaml("cumulo.train.head", "words.yaml")
    return found


@dataclass(frozen=True, slots=True)
class AskedTurns:
    turns: tuple[str, ...]  # a user's; the model answers each
    system: str | None = None


class Grammar:
    def __init__(self, seed: int) -> None:
        self._random, self._words = random.Random(seed), _words()

    def conversations(self, count: int) -> list[AskedTurns]:
        """`count` conversations, all different, of all kinds in fixed shares."""
        names, shares = zip(*_SHARES.items(), strict=True)
        found: dict[AskedTurns, None] = {}
        tries = 0
        while len(found) < count and tries < 4 * count + 1000:
            kind: Callable[[Grammar], str] = self._random.choices(names, shares)[0]
            found[self._conversation(kind(self))] = None
            tries += 1
        return list(found)[:count]

    def _conversation(self, first: str) -> AskedTurns:
        turns = (first, self.one("follow_ups")) if self._random.random() < 0.12 else (first,)
        return AskedTurns(turns, self.one("systems") if self._random.random() < 0.1 else None)

    def one(self, kind: str) -> str:
        """A form or a word of a kind."""
        return self._random.choice(self._words[kind])

    def number(self, low: int, high: int) -> int:
        return self._random.randrange(low, high)

    # -- kinds ------------------------------------------------------------------------------------------------
    def asked(self) -> str:
        return self.one("questions").format(self.one("topics"))

    def written(self) -> str:
        text = self.one("texts").format(self.one("topics"))
        return f"{text} {self.one('manners')}" if self._random.random() < 0.4 else text

    def advised(self) -> str:
        return self.one("advice").format(self.one("activities"))

    def who_and_where(self) -> str:
        if self._random.random() < 0.5:
            return self.one("of_persons").format(self.one("persons"))
        return self.one("of_places").format(self.one("places"))

    def coded(self) -> str:
        form = self.one("code")
        return form.format(task=self.one("programs"), language=self.one("languages_of_code"))

    def explained_code(self) -> str:
        return f"{self.one('about_code')}\n\n{self.one('snippets')}"

    def sentence(self) -> str:
        return f"{self.one('subjects')} {self.one('verbs')} {self.one('objects')}{self.one('circumstances')}."

    def paragraph(self) -> str:
        return " ".join(self.sentence() for _ in range(self.number(3, 8)))

    def translated(self) -> str:
        form = self.one("translate")
        return form.format(language=self.one("languages"), text=self.sentence())

    def edited(self) -> str:
        text = self.sentence() if self._random.random() < 0.6 else self.paragraph()
        if self._random.random() < 0.4:  # with the mistakes of a hasty writer
            text = text.replace("the ", "teh ", 1).replace("ed ", " ", 1).lower()
        return self.one("edit").format(text)

    def summarised(self) -> str:
        return self.one("summarise").format(self.paragraph())

    def sorted_out(self) -> str:
        return self.one("classify").format(self.sentence())

    def calculated(self) -> str:
        a, b, c = self.number(2, 20), self.number(3, 120), self.number(2, 12)
        return self.one("sums").format(a=a, b=b, c=c, big=a * b * 10, thing=self.one("goods"))

    def played(self) -> str:
        return self.one("play").format(role=self.one("roles"), topic=self.one("topics"))

    def compared(self) -> str:
        return self.one("compare").format(*self._random.sample(self._words["topics"], 2))

    def chatted(self) -> str:
        return self.one("small_talk").format(self.one("activities"))


_SHARES: dict[Callable[[Grammar], str], float] = {
    Grammar.asked: 22, Grammar.written: 16, Grammar.advised: 12, Grammar.who_and_where: 9, Grammar.coded: 8,
    Grammar.explained_code: 2, Grammar.translated: 4, Grammar.edited: 6, Grammar.summarised: 4,
    Grammar.sorted_out: 3, Grammar.calculated: 4, Grammar.played: 4, Grammar.compared: 3, Grammar.chatted: 3,
}  # fmt: skip

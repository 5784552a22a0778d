"""Conversations that a head learns from: tasks of many kinds, made by a small grammar. What the answers say does
not matter; a head has to see all the ways in which its model begins, lists, corrects, counts and refuses.

Neither the prompts of `cumulo bench speculate` nor their forms are among them (a test compares).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from cumulo.train.head import words


@dataclass(frozen=True, slots=True)
class AskedTurns:
    turns: tuple[str, ...]  # a user's; the model answers each
    system: str | None = None


class Grammar:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def conversations(self, count: int) -> list[AskedTurns]:
        """So many, all different, of all kinds in fixed shares."""
        names, shares = zip(*_SHARES.items(), strict=True)
        found: dict[AskedTurns, None] = {}
        tries = 0
        while len(found) < count and tries < 4 * count + 1000:
            kind: Callable[[Grammar], str] = self._random.choices(names, shares)[0]
            found[self._conversation(kind(self))] = None
            tries += 1
        return list(found)[:count]

    def _conversation(self, first: str) -> AskedTurns:
        turns = (first, self.one(words.FOLLOW_UPS)) if self._random.random() < 0.12 else (first,)
        return AskedTurns(turns, self.one(words.SYSTEMS) if self._random.random() < 0.1 else None)

    def one(self, choices: tuple[str, ...]) -> str:
        return self._random.choice(choices)

    def number(self, low: int, high: int) -> int:
        return self._random.randrange(low, high)

    # -- kinds ------------------------------------------------------------------------------------------------
    def asked(self) -> str:
        return self.one(words.QUESTIONS).format(self.one(words.TOPICS))

    def written(self) -> str:
        text = self.one(words.TEXTS).format(self.one(words.TOPICS))
        return f"{text} {self.one(words.MANNERS)}" if self._random.random() < 0.4 else text

    def advised(self) -> str:
        return self.one(words.ADVICE).format(self.one(words.ACTIVITIES))

    def who_and_where(self) -> str:
        if self._random.random() < 0.5:
            return self.one(words.OF_PERSONS).format(self.one(words.PERSONS))
        return self.one(words.OF_PLACES).format(self.one(words.PLACES))

    def coded(self) -> str:
        form = self.one(words.CODE)
        return form.format(task=self.one(words.PROGRAMS), language=self.one(words.LANGUAGES_OF_CODE))

    def explained_code(self) -> str:
        return f"{self.one(words.ABOUT_CODE)}\n\n{self.one(words.SNIPPETS)}"

    def sentence(self) -> str:
        return (
            f"{self.one(words.SUBJECTS)} {self.one(words.VERBS)} {self.one(words.OBJECTS)}"
            f"{self.one(words.CIRCUMSTANCES)}."
        )

    def paragraph(self) -> str:
        return " ".join(self.sentence() for _ in range(self.number(3, 8)))

    def translated(self) -> str:
        form = self.one(words.TRANSLATE)
        return form.format(language=self.one(words.LANGUAGES), text=self.sentence())

    def edited(self) -> str:
        text = self.sentence() if self._random.random() < 0.6 else self.paragraph()
        if self._random.random() < 0.4:  # with the mistakes of a hasty writer
            text = text.replace("the ", "teh ", 1).replace("ed ", " ", 1).lower()
        return self.one(words.EDIT).format(text)

    def summarised(self) -> str:
        return self.one(words.SUMMARISE).format(self.paragraph())

    def sorted_out(self) -> str:
        return self.one(words.CLASSIFY).format(self.sentence())

    def calculated(self) -> str:
        a, b, c = self.number(2, 20), self.number(3, 120), self.number(2, 12)
        return self.one(words.SUMS).format(a=a, b=b, c=c, big=a * b * 10, thing=self.one(words.GOODS))

    def played(self) -> str:
        return self.one(words.PLAY).format(role=self.one(words.ROLES), topic=self.one(words.TOPICS))

    def compared(self) -> str:
        return self.one(words.COMPARE).format(*self._random.sample(words.TOPICS, 2))

    def chatted(self) -> str:
        return self.one(words.SMALL_TALK).format(self.one(words.ACTIVITIES))


_SHARES: dict[Callable[[Grammar], str], float] = {
    Grammar.asked: 22, Grammar.written: 16, Grammar.advised: 12, Grammar.who_and_where: 9, Grammar.coded: 8,
    Grammar.explained_code: 2, Grammar.translated: 4, Grammar.edited: 6, Grammar.summarised: 4,
    Grammar.sorted_out: 3, Grammar.calculated: 4, Grammar.played: 4, Grammar.compared: 3, Grammar.chatted: 3,
}  # fmt: skip

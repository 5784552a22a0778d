"""ProposedDraft: tokens that a draft model or a head proposed to follow the known ones, until more are known."""

from collections.abc import Sequence as ListLike

from cumulo.engine.decide.speculation.acceptance import CHANCE_CLASSES, class_of_chance


class ProposedDraft:
    """Of one sequence; the same calls as NgramDraft's."""

    __slots__ = ("_tokens", "kinds", "size")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self.kinds: list[int] = [CHANCE_CLASSES - 1]  # of each token: how sure its drafter is, in classes
        self.size = 0  # tokens entered

    def propose(self, tokens: list[int], chances: ListLike[float] | None) -> None:
        """They follow the tokens entered so far."""
        self._tokens = tokens
        self.kinds = (
            [CHANCE_CLASSES - 1] * len(tokens) if chances is None else list(map(class_of_chance, chances))
        )

    def advance(self, tokens: ListLike[int], to: int) -> tuple[int, int]:
        """Enter the tokens up to position `to`; of those that were proposed, how many came and how many did not."""
        hits = 0
        came, proposed = to - self.size, self._tokens
        while hits < min(came, len(proposed)) and tokens[self.size + hits] == proposed[hits]:
            hits += 1
        missed = hits < min(came, len(proposed))
        self.size, self._tokens = to, []
        return hits, int(missed)

    @property
    def expects(self) -> bool:
        return bool(self._tokens)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def next_tokens(self, tokens: ListLike[int], count: int) -> list[int]:
        return self._tokens[:count]

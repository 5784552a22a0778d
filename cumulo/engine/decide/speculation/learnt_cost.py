"""LearntCost: how long a step of so many tokens takes, learnt from the steps that ran: what drafts cost."""

_NEWS = 0.2  # share of the news in an average
_SHORTER, _LONGER = 0.4, 0.1  # the same, for a step that took less or more time than usual
_FADE = 0.995  # weight of an average after each step that it was not part of
_MOST_TOKENS = 64  # larger steps say what prompts cost
_LEAST_WEIGHT = 0.02
_PRIOR = 0.01  # weight of what prompts say about sizes not seen yet: they draw nothing, so drafts cost more
_ONCE_SHARE = 0.02  # of the weight of a size seen once, which may have been held up


class LearntCost:
    """A straight line over the step's tokens: a fixed part (weights are read once) and a part for each token."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}  # by tokens: average seconds, weight, times
        self._prompt_s: float | None = None  # for one token more in a step of many
        self._fitted: tuple[float, float] | None = None

    def observe(self, tokens: int, seconds: float, has_prompts: bool = False) -> None:
        """`has_prompts`: some of the tokens are a prompt's. They say little about drafts, of which each is drawn
        from; and a short prompt is so many tokens more than a draft that it would decide the line alone."""
        if tokens < 1 or seconds <= 0:
            return
        self._fitted = None
        if tokens > _MOST_TOKENS or has_prompts:
            measured = seconds / tokens
            self._prompt_s = (
                measured if self._prompt_s is None else self._prompt_s + _NEWS * (measured - self._prompt_s)
            )
            return
        for known in self._seen.values():
            known[1] *= _FADE
        found = self._seen.setdefault(tokens, [seconds, 0.0, 0])
        # Others on the machine only make steps longer: what a short one says counts for more.
        found[0] += (_SHORTER if seconds < found[0] else _LONGER) * (seconds - found[0])
        found[1] = min(20.0, found[1] + 1)
        found[2] += 1

    @property
    def known(self) -> bool:
        return bool(self._seen)

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and of each token. Only if something is `known`."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[float, float]:
        """Weighted least squares. A point far away, of prompts, stands in for sizes not seen yet."""
        points = [
            (tokens, seconds, weight if times > 1 else _ONCE_SHARE * weight)
            for tokens, (seconds, weight, times) in self._seen.items()
            if weight > _LEAST_WEIGHT
        ] or [(tokens, seconds, 1.0) for tokens, (seconds, _, _) in self._seen.items()]
        heaviest = max(points, key=lambda point: point[2])
        slope = self._prompt_s if self._prompt_s is not None else heaviest[1] / (heaviest[0] + 2)
        slope = min(slope, heaviest[1] / (heaviest[0] + 1))  # reading the weights costs as much as a token
        points.append((heaviest[0] + 8, heaviest[1] + 8 * slope, 64 * _PRIOR))
        # Near the size that is usual: what the first draft costs matters most, and further ones may cost more.
        points = [
            (tokens, seconds, weight / max(1, tokens - heaviest[0]) ** 2)
            for tokens, seconds, weight in points
        ]
        total = sum(weight for _, _, weight in points)
        mean_tokens = sum(tokens * weight for tokens, _, weight in points) / total
        mean_s = sum(seconds * weight for _, seconds, weight in points) / total
        spread = sum(weight * (tokens - mean_tokens) ** 2 for tokens, _, weight in points)
        slope = (
            sum(weight * (tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds, weight in points)
            / spread
        )
        # A step's fixed part is never negative, and a token never gives time back.
        slope = min(max(slope, 0.0), mean_s / mean_tokens)
        return mean_s - slope * mean_tokens, slope

    def step_s(self, tokens: int) -> float:
        fixed_s, token_s = self.line
        return fixed_s + token_s * tokens

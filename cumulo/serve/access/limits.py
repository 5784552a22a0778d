"""RateLimits: how much each caller may ask per minute. Used by the gate (requests) and by Service (tokens).

Token buckets: an allowance refills evenly and is at most one minute's worth. The length of an answer is known
only when it has been given, so output tokens are charged afterwards and may leave a debt, which delays the
caller's next request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cumulo.serve.access.keys import Caller
from cumulo.serve.errors import ApiError

Kind = Literal["requests", "tokens"]


@dataclass(slots=True)
class Bucket:
    per_minute: int
    level: float
    filled_s: float

    def refill(self, now_s: float) -> None:
        self.level = min(self.per_minute, self.level + (now_s - self.filled_s) * self.per_minute / 60)
        self.filled_s = now_s

    def wait_s(self, wanted: float) -> float:
        """How long until so much may be taken; an amount above a whole minute's needs a full bucket."""
        missing = min(wanted, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)


class RateLimits:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def _bucket(self, kind: Kind, caller: Caller) -> Bucket | None:
        per_minute = caller.requests_per_minute if kind == "requests" else caller.tokens_per_minute
        if per_minute is None:
            return None
        now_s = self._clock()
        bucket = self._buckets.get((kind, caller.name))
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[kind, caller.name] = Bucket(per_minute, per_minute, now_s)
        bucket.refill(now_s)
        return bucket

    def take_amount(self, kind: Kind, caller: Caller, amount: int) -> float:
        """Take so many requests or prompt tokens; returns the seconds to wait, 0 if they were taken."""
        bucket = self._bucket(kind, caller)
        if bucket is None:
            return 0.0
        wait_s = bucket.wait_s(amount)
        if wait_s == 0:
            bucket.level -= amount
        return wait_s

    def charge_request(self, caller: Caller) -> None:
        """Raises ApiError 429 where the caller has to wait."""
        allowed = f"{caller.requests_per_minute} requests per minute are allowed and have been made"
        self._charge("requests", caller, 1, allowed)

    def charge_prompt(self, caller: Caller, tokens: int) -> None:
        """Raises ApiError 429 where the caller has to wait."""
        allowed = f"this key may use {caller.tokens_per_minute or 0:,} tokens per minute and has used them"
        self._charge("tokens", caller, tokens, allowed)

    def _charge(self, kind: Kind, caller: Caller, amount: int, allowed: str) -> None:
        if (wait_s := self.take_amount(kind, caller, amount)) > 0:
            raise ApiError(
                429,
                f"{allowed}: try again in {wait_s:.0f} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def charge_output(self, caller: Caller, tokens: int) -> None:
        bucket = self._bucket("tokens", caller)
        if bucket is not None:
            bucket.level -= tokens

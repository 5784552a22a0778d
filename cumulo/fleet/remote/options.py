"""How the servers behind a gateway are named and reached. The gateway adds options of its own (GatewayOptions)."""

import secrets
from dataclasses import dataclass, field

from cumulo.errors import CumuloError
from cumulo.load.connection import ServerAddress


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A replica as it was given: its address, the pool it is in, and its weight there."""

    url: str
    model: str | None = None  # None: whatever it serves
    weight: float = 1.0  # share of the pool's requests, against the others'; 0: only if no other takes them

    def __post_init__(self) -> None:
        # Without /v1, with which clients of the API have it.
        object.__setattr__(self, "url", ServerAddress(self.url).url.removesuffix("/v1"))
        if not 0 <= self.weight < 1e6:
            raise CumuloError(f"the weight of {self.url} must be 0 or more, got {self.weight:g}")

    @classmethod
    def parse(cls, text: str) -> "PoolMember":
        """`MODEL=URL` or `MODEL=URL@WEIGHT`."""
        model, equals, rest = text.partition("=")
        if not equals or not model or not rest:
            raise CumuloError(
                f"--pool {text!r} should look like MODEL=URL or MODEL=URL@WEIGHT, "
                "for instance --pool chat=http://10.0.0.7:8000@0.05"
            )
        url, at, weight = rest.rpartition("@")
        if not at:
            return cls(rest, model)
        try:
            return cls(url, model, float(weight))
        except ValueError:
            raise CumuloError(
                f"{weight!r} in --pool {text!r} is not a weight; write a number such as 0.05"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    members: tuple[PoolMember, ...]
    fleet_key: str | None = None  # what Cumulo servers ask for; None: they are used as any OpenAI server is
    router: str = "prefix-aware"  # or "least-loaded", "round-robin"
    retries: int = 3  # further replicas that a request is tried on without a token in between
    wait_for_replica_s: float = 15.0  # how long a request waits while no replica takes it
    connect_timeout_s: float = 2.0
    hang_timeout_s: float = 5.0  # a replica that says nothing for this long is taken for hung
    stall_timeout_s: float = 30.0  # ... or whose engine has work and finishes no step
    breaker_failures: int = 3  # in a row, until a replica is left alone for a while
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # by which a gateway knows its own requests

"""GatewayOptions: every option of the gateway, documented where it is defined. Made by `cumulo gateway`."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from cumulo.engine.decide import routing
from cumulo.errors import CumuloError, require_least
from cumulo.fleet.remote.options import PoolMember, RemoteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(RemoteOptions):
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: Path | None = None  # of clients; None: their keys go to the replicas, which may ask for them
    # Of those who add, remove and drain replicas, as may API keys that may operate.
    operator_key: str | None = None
    requests_per_minute: int | None = None  # per key without a limit of its own
    tokens_per_minute: int | None = None
    first_byte_timeout_s: float = 600.0  # of an answer
    idle_timeout_s: float = 120.0  # between two pieces of a streamed answer
    drain_timeout_s: float = 30.0  # after SIGTERM: how long running requests may take to finish
    max_connections: int = 8192
    max_body_bytes: int = 4 << 20
    # Of the bodies of all requests that run; those of one API key may be half of it. Uploads are not held.
    max_held_bytes: int = 512 << 20
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 60.0  # longest time in which a client reads nothing of its answer
    allow_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    stories: int = 1000  # requests whose routing is kept for /v1/requests/{id}/explain
    log_level: str = "info"

    def __post_init__(self) -> None:
        routing.router(self.router)  # refuses one that does not exist
        require_least(self, 0, "wait_for_replica_s", "drain_timeout_s", unit=" seconds")
        require_least(  # with 0 every replica would be taken for dead
            self, 0, "connect_timeout_s", "hang_timeout_s", "stall_timeout_s", "first_byte_timeout_s",
            "idle_timeout_s", above=True, unit=" seconds",
        )  # fmt: skip
        require_least(self, 0, "retries")
        require_least(
            self, 1, "breaker_failures", "max_connections", "max_body_bytes", "max_held_bytes", "stories"
        )
        require_least(self, 1, "requests_per_minute", "tokens_per_minute", advice="; omit it for no limit")
        urls = [member.url for member in self.members]
        for url in urls:
            if urls.count(url) > 1:
                raise CumuloError(f"{url} is given twice; a server has one place in a fleet")
        if not self.members:
            raise CumuloError("a gateway needs at least one server: cumulo gateway http://127.0.0.1:8000")


class MemberRow(msgspec.Struct, forbid_unknown_fields=True):
    """A replica as it stands in a file, or in a request that adds it."""

    url: str
    model: str | None = None
    weight: float = 1.0

    def member(self) -> PoolMember:
        return PoolMember(self.url, self.model, self.weight)


class _MembersFile(msgspec.Struct, forbid_unknown_fields=True):
    replicas: list[MemberRow]


def read_members(path: Path) -> tuple[PoolMember, ...]:
    """A YAML file: {replicas: [{url, model?, weight?}, ...]}."""
    try:
        file = msgspec.convert(yaml.safe_load(path.read_text("utf-8")), _MembersFile)
    except OSError as error:
        raise CumuloError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CumuloError(
            f"{path} is no list of replicas: {error}; it should look like\n"
            "replicas:\n  - url: http://10.0.0.7:8000\n    model: chat\n    weight: 1"
        ) from error
    return tuple(row.member() for row in file.replicas)

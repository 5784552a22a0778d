"""`cumulo gateway`: one address in front of several servers."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from cumulo.cli.shared.declare import argument, group, option, takes_options
from cumulo.cli.shared.serve_options import KEYS, WebOptions
from cumulo.cli.shared.terminal import note
from cumulo.errors import CumuloError

if TYPE_CHECKING:
    from cumulo.fleet.remote.replicas import Replicas

EXAMPLE = (
    "Example: [bold]cumulo gateway http://127.0.0.1:8000 http://127.0.0.1:8001 --fleet-key-file fleet.key[/bold], "
    "then point any OpenAI client at http://127.0.0.1:8080/v1"
)


@dataclass(frozen=True, kw_only=True)
class GatewayCommandOptions:
    urls: list[str] | None = argument("Servers to use as replicas of one model.", None, metavar="URL")
    pool: list[str] | None = option(
        "Server of a model's pool, with its share of the requests. Can be given more than once.",
        None,
        metavar="MODEL=URL[@WEIGHT]",
    )
    config: Path | None = option(
        "YAML file with the replicas: a list `replicas` of url, model and weight.", None
    )
    fleet_key_file: Path | None = KEYS(
        "File with the key that Cumulo servers were started with, too; streams survive only with it. "
        "Default: $CUMULO_FLEET_KEY, or none.",
        None,
    )
    operator_key_file: Path | None = KEYS(
        "File with the key that adds, drains and removes replicas, as do keys of --api-keys that may operate.",
        None,
    )
    api_keys: Path | None = KEYS(
        "Require one of the API keys in this file (made by cumulo serve --new-api-key), and pass none on. Default: "
        "the replicas check keys.",
        None,
    )
    web: WebOptions = group(
        WebOptions(port=8080, max_connections=8192),
        helps={
            "requests_per_minute": "Request limit per key, over all replicas.",
            "tokens_per_minute": "Token limit per key, over all replicas.",
            "max_connections": "Maximum number of open client connections.",
        },
    )
    router: str = option("Routing policy: prefix-aware, least-loaded or round-robin.", "prefix-aware")
    retries: int = option("Further attempts on other replicas, without a token in between.", 3)
    wait_for_replica_s: float = option("Seconds that a request waits while no replica takes requests.", 15.0)
    connect_timeout_s: float = option("Seconds to connect to a replica.", 2.0)
    hang_timeout_s: float = option(
        "Seconds of silence after which a replica counts as hung and its streams move.", 5.0
    )
    stall_timeout_s: float = option(
        "Seconds without a finished step, while it has work, after which the streams of a replica move.", 30.0
    )
    first_byte_timeout_s: float = option("Seconds until the first byte of an answer.", 600.0)
    idle_timeout_s: float = option("Seconds between two pieces of a stream.", 120.0)
    breaker_failures: int = option("Failures in a row after which a replica is left alone for a while.", 3)
    max_held_mib: float = option(
        "Maximum size of the bodies of all running requests together, in MiB; half of it per API key.", 512.0
    )


@takes_options
def gateway(chosen: GatewayCommandOptions) -> None:
    """Route requests to several servers; streams of a server that dies are continued by another."""
    try:
        from cumulo.fleet.remote.options import PoolMember
        from cumulo.gateway.options import GatewayOptions, read_members
        from cumulo.gateway.server import run
    except ImportError as error:
        raise CumuloError(
            f"the gateway needs packages that are not installed ({error.name}): "
            "pip install -e '.[serve]' in Cumulo's folder"
        ) from error
    from cumulo.fleet.wire import fleet_key, read_key
    from cumulo.serve import stderr_log

    stderr_log.install()
    members = [PoolMember(url) for url in chosen.urls or ()]
    members += [PoolMember.parse(text) for text in chosen.pool or ()]
    if chosen.config is not None:
        members += read_members(chosen.config)
    told = {
        **vars(chosen),
        **chosen.web.fields(),
        "members": tuple(members),
        "fleet_key": fleet_key(chosen.fleet_key_file),
        "operator_key": None if chosen.operator_key_file is None else read_key(chosen.operator_key_file),
        "max_held_bytes": int(chosen.max_held_mib * (1 << 20)),
    }
    used = GatewayOptions(**{one.name: told[one.name] for one in fields(GatewayOptions) if one.name in told})
    if used.fleet_key is None:
        note("without --fleet-key-file the streams of a server that dies end with an error")

    def on_listening(url: str, fleet: "Replicas") -> None:
        note(f"listening on {url}; the API is at {url}/v1")
        for replica in fleet.replicas.values():
            waits = f"{replica.trouble}; it gets requests as soon as it is ready"
            note(f"{replica.name}: {waits if replica.trouble else ', '.join(replica.models)}")

    run(used, on_listening=on_listening)

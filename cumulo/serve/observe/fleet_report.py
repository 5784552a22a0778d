"""The fleet as plain data: replicas, their load and caches, and recent routing decisions. For /v1/fleet and the
console.
"""

import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.serve.engine_link.in_flight import Dispatch
from cumulo.serve.engine_link.messages import Stats
from cumulo.serve.observe.stories import route_words
from cumulo.serve.replicas.fleet import Fleet
from cumulo.serve.replicas.replica import FleetReplica

_DECISIONS = 50


def fleet_report(fleet: Fleet) -> dict[str, Any]:
    now_s = time.perf_counter()
    return {
        "object": "fleet",
        "router": fleet.policy,
        "replicas": replica_reports(fleet),
        "prefill_engines": prefill_reports(fleet),
        "autoscale": fleet.scaling_report() if fleet.scaling_report is not None else None,
        "decisions": [
            decision_report(name, dispatch, now_s)
            for name, dispatch in reversed(list(fleet.decisions)[-_DECISIONS:])
        ],
    }


def replica_reports(fleet: Fleet) -> list[dict[str, Any]]:
    copies = _copies(fleet)
    return [_replica(replica, copies) for replica in fleet.replicas.values()]


def replica_report(fleet: Fleet, replica: FleetReplica) -> dict[str, Any]:
    return _replica(replica, _copies(fleet))


def decision_report(request_id: str, dispatch: Dispatch, now_s: float) -> dict[str, Any]:
    words = route_words(dispatch.route)
    return {
        "request_id": request_id,
        "age_s": round(now_s - dispatch.time_s, 3),
        **{name: words[name] for name in ("replica", "ttft_ms", "cached_tokens", "why", "second")},
        "moved_because": dispatch.moved_because or None,
    }


def _copies(fleet: Fleet) -> Counter[BlockHash]:
    """How many replicas hold each block."""
    copies: Counter[BlockHash] = Counter()
    for replica in fleet.replicas.values():
        copies.update(replica.blocks)
    return copies


def overlaps(fleet: Fleet) -> dict[str, dict[str, int]]:
    """By replica: how many of its cached blocks each other replica holds, too."""
    replicas = fleet.replicas.values()
    return {
        one.name: {other.name: len(one.blocks & other.blocks) for other in replicas if other is not one}
        for one in replicas
    }


def state_of(replica: FleetReplica) -> str:
    if replica.busy_with == "removed":
        return "removing"
    if replica.draining and replica.client.state == "ready":
        return "draining"
    return replica.client.state


def prefill_reports(fleet: Fleet) -> list[dict[str, Any]]:
    """Engines that compute the replicas' prompts; empty where every replica computes its own."""
    engines = fleet.prefill.engines if fleet.prefill is not None else {}
    clients = {name: engine.client for name, engine in engines.items()}
    return [
        {
            "name": name,
            "object": "fleet.prefill_engine",
            "state": client.state,
            "pid": next(iter(client.engine_pids), None),
            "running": client.stats.running if client.stats is not None else 0,
            "waiting": client.stats.waiting if client.stats is not None else 0,
            "transfers": _transfers(client.stats),
            "restarts": client.restarts,
            "last_failure": client.last_failure,
        }
        for name, client in clients.items()
    ]


def _transfers(stats: Stats | None) -> dict[str, Any] | None:
    """KV that an engine gets from others, or holds for them; None: it has no role."""
    found = stats.transfers if stats is not None else None
    if found is None:
        return None
    return {
        "received": found.landed,
        "failed": found.failed,
        "received_bytes": found.copied_bytes,
        "bytes_per_s": round(found.copied_bytes / found.copying_s) if found.copying_s else None,
        "receiving": found.receiving,
        "sending": found.sending,
        "prefill_engines": found.peers,
    }


def _replica(replica: FleetReplica, copies: Counter[BlockHash]) -> dict[str, Any]:
    client = replica.client
    stats, speed = client.stats, replica.prompt_s_per_token
    routing = stats.routing if stats is not None else None
    return {
        "name": replica.name,
        "object": "fleet.replica",
        "state": state_of(replica),
        "detail": replica.unlike or None,
        "pid": next(iter(client.engine_pids), None),
        "in_flight": len(client.in_flight),
        "running": stats.running if stats is not None else 0,
        "waiting": client.waiting,
        "waiting_tokens": sum(tokens for _, _, tokens in routing.queues) if routing is not None else 0,
        "blocks": {
            "used": stats.blocks_used if stats is not None else 0,
            "total": stats.blocks_total if stats is not None else 0,
            "cached": len(replica.blocks),
            "also_elsewhere": sum(copies[block] > 1 for block in replica.blocks),
        },
        "prompt_tok_s": round(1 / speed, 1) if speed else None,
        "step_ms": round(replica.step_s * 1e3, 3) if replica.step_s is not None else None,
        "requests": replica.requests,
        "prompt_tokens": replica.prompt_tokens,
        "cached_tokens": replica.cached_tokens,
        "ranks": [asdict(one) for one in stats.ranks] if stats is not None else [],
        "transfers": _transfers(stats),
        "restarts": client.restarts,
        "last_failure": client.last_failure,
    }

"""/internal/fleet/state: a server tells a gateway what it has and how busy it is, line by line, as it changes.

A line comes at least every half second, so that a gateway notices soon when a server hangs.
"""

import asyncio
import hashlib
import statistics
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from cumulo import __version__
from cumulo.base.files import sampled_digest
from cumulo.fleet.wire import STATE_PATH, STATE_TYPE, FleetIdentity, FleetNews, written
from cumulo.models.files.hub import resolve
from cumulo.serve.engine_link.messages import StepRecord
from cumulo.serve.service import Service

router = APIRouter(include_in_schema=False)
_TICK_S = 0.1
_LONGEST_SILENCE_S = 0.5
_RARELY_TICKS = 10


@router.get(STATE_PATH)
async def fleet_state(request: Request) -> Response:
    state = request.app.state
    service: Service = state.service
    identity: FleetIdentity | None = getattr(state, "fleet_identity", None)
    if identity is None:  # once: a busy server would keep a gateway waiting for it
        identity = state.fleet_identity = await asyncio.to_thread(fleet_identity, service)
    return StreamingResponse(_lines(service, identity), media_type=STATE_TYPE)


async def _lines(service: Service, identity: FleetIdentity) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    told_s, ticks, speeds = 0.0, 0, (0.0, 0.0)
    told: FleetNews | None = None
    told_adapters: dict[str, str] | None = None
    first: FleetIdentity | None = identity
    while True:
        if ticks % _RARELY_TICKS == 0:
            speeds = measured_speeds(service.recent_steps)
        ticks += 1
        news = _news(service, *speeds)
        adapters = {one.name: one.fingerprint for one in service.adapters.served.values()}
        if news != told or adapters != told_adapters or loop.time() - told_s >= _LONGEST_SILENCE_S:
            told, told_s = news, loop.time()
            loaded = adapters if adapters != told_adapters else None
            line = msgspec.structs.replace(news, identity=first, adapters=loaded)
            yield written(line) + b"\n"
            first, told_adapters = None, adapters
        if service.draining and not service.engine.in_flight and not service.unsent:
            return
        await asyncio.sleep(_TICK_S)


def _news(service: Service, prompt_tok_s: float, step_s: float) -> FleetNews:
    engine = service.engine
    stats = engine.stats
    return FleetNews(
        ready=service.takes_requests,
        draining=service.draining,
        running=stats.running if stats is not None else 0,
        waiting=engine.waiting,
        waiting_tokens=_waiting_tokens(service),
        steps=stats.steps if stats is not None else 0,
        prompt_tok_s=prompt_tok_s,
        step_s=step_s,
    )


def _waiting_tokens(service: Service) -> int:
    fleet = service.fleet
    all_stats = (
        [service.engine.stats] if fleet is None else [one.client.stats for one in fleet.replicas.values()]
    )
    told = [stats.routing for stats in all_stats if stats is not None and stats.routing is not None]
    return sum(tokens for routing in told for _, _, tokens in routing.queues)


def measured_speeds(records: Iterable[StepRecord]) -> tuple[float, float]:
    """Prompt tokens per second in steps that are mostly prompts, and the median time of steps that only decode;
    0 where none was seen."""
    tokens, busy_s, decoding_s = 0, 0.0, list[float]()
    for record in records:
        took_s = record.finished_s - record.started_s
        if record.prefill_tokens > record.decode_tokens:
            tokens, busy_s = tokens + record.prefill_tokens, busy_s + took_s
        elif record.decode_tokens and not record.prefill_tokens:
            decoding_s.append(took_s)
    return (tokens / busy_s if busy_s else 0.0), (statistics.median(decoding_s) if decoding_s else 0.0)


def fleet_identity(service: Service) -> FleetIdentity:
    """Which model a server has, as a fingerprint: two servers with the same one draw the same tokens. It reads the
    model's files; call it in a thread, once the engine has said what it loaded."""
    info, text = service.info, service.text
    tokenizer = hashlib.sha256()
    for token in range(text.tokenizer.vocab_size):
        tokenizer.update(text.tokenizer.token_bytes(token) + b"\n")
    engine = service.options.engine
    whole = hashlib.sha256(tokenizer.digest())
    whole.update(repr((info.vocab_size, info.hidden_size, info.eos_ids, info.generation_defaults)).encode())
    whole.update(repr((engine.dtype, engine.weights, engine.kv_dtype)).encode())
    for path in _files(resolve(service.options.model).path):
        whole.update(path.name.encode() + sampled_digest(path))
    if service.options.chat_template is not None:
        whole.update(service.options.chat_template.read_bytes())
    return FleetIdentity(
        version=__version__,
        model=service.model_name,
        fingerprint=whole.hexdigest()[:16],
        tokenizer=tokenizer.hexdigest()[:16],
        max_context=info.max_context,
        max_running=info.max_running,
    )


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())

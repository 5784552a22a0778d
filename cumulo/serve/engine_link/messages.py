"""What the API process and the engine process say to each other, packed as MessagePack by msgspec.

Commands go to the engine, reports come back. The engine's own dataclasses (SamplingParams, Delta, Sample,
Story) travel as they are, so there is no second description of them to keep in step.
"""

from typing import Any

import msgspec

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.request import FinishReason
from cumulo.engine.decide.kv_tiers import TierCounts
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.decide.story import Story
from cumulo.engine.outputs import Delta, Sample
from cumulo.ranks.rank_meter import RankState
from cumulo.spec.slo import Slo


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Asks for an AdapterReport."""

    key: str
    name: str
    folder: str


class EngineJob(msgspec.Struct, frozen=True):
    """What an engine process is started with: the first line of its standard input, as JSON."""

    model: str | None
    config: EngineConfig
    keep_quantised: bool = True
    log_level: str = "info"
    for_router: bool = False  # reports RoutingNews
    adapters: list[LoadAdapter] = []  # that it loads before it is ready
    needs_adapters: bool = False  # one that cannot be loaded ends it; otherwise it starts without


# -- commands -------------------------------------------------------------------------------------------------
class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    tokens: bytes  # the prompt's ids as 32-bit integers: a long prompt is one copy, not a list of objects
    params: SamplingParams
    stream: bool
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""  # who is owed a fair share: the name of the caller's key; empty where there are no keys
    resumed: bytes = b""  # output tokens that another engine drew, packed as the prompt
    # The same for each of several samples, with why it ended if it has.
    resumed_samples: list[tuple[bytes, FinishReason | None]] = []
    session: str = ""  # requests of one session prefer one replica
    expects_cached: int = 0  # tokens that a router expects in the engine's prefix cache
    slo: Slo | None = None  # the latency asked for; None: the engine's own, if it has one
    adapter: str = ""  # the key of its adapter; empty: none


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class InspectBlocks(msgspec.Struct, frozen=True, tag="inspect_blocks"):
    """Asks for a BlockMap."""


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """No request that uses it is on its way."""

    key: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now; whatever still runs is aborted."""


Command = Submit | Abort | InspectBlocks | LoadAdapter | DropAdapter | Shutdown


# -- reports --------------------------------------------------------------------------------------------------
class AdapterReport(msgspec.Struct, frozen=True, tag="adapter"):
    """An adapter is loaded, or is not: then `error` says why."""

    key: str
    error: str
    rank: int = 0
    fingerprint: str = ""
    ledger: dict[str, Any] | None = None  # with it, where it was loaded while serving


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; the first report of an engine process that started well."""

    model_name: str
    max_context: int
    vocab_size: int
    hidden_size: int  # numbers in an embedding
    eos_ids: list[int]
    generation_defaults: dict[str, Any]
    kv_blocks: int
    block_size: int
    max_running: int
    max_tokens_per_step: int
    runs_on: str
    ledger: dict[str, Any]
    adapters: list[AdapterReport] = []  # of those that its job named


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """What one step contained and how long the runner took."""

    index: int
    started_s: float  # monotonic clock, the same in both processes
    finished_s: float
    prefill_tokens: int  # computed in chunks: prompts and recomputed contexts
    decode_tokens: int  # sequences that computed one token
    draws: int
    prompt_pairs: int = 0  # of a token with each one that it attends to, in chunks: attention's work


class FairnessReport(msgspec.Struct, frozen=True, array_like=True):
    """How evenly tenants were served in the last minute, and what each was served since the last report."""

    index: float  # Jain's: 1 is even
    served: list[tuple[str, int, int]]  # tenant, prompt tokens computed, tokens drawn


class RoutingNews(msgspec.Struct, frozen=True, array_like=True):
    """What a router needs to know of an engine; told only where there are several engines."""

    requests: int  # that run or wait
    queues: list[tuple[int, str, int]]  # priority, tenant, prompt tokens not computed yet
    prompt_s_per_token: float
    came: bytes = b""  # hashes of KV blocks that can be shared since the last report, one after the other
    went: bytes = b""  # ... that cannot be any more


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """KV transfers of an engine with a role, since its process began."""

    heard: int  # words of other engines: one that waits for them is alive
    landed: int  # prompts whose KV arrived from a prefill engine
    failed: int  # ... that had to be computed elsewhere or here
    copied_bytes: int
    copying_s: float
    receiving: int  # now
    sending: int
    peers: list[str]  # prefill engines that can be reached now


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks beyond the device."""

    host_blocks: int
    host_blocks_used: int
    disk_blocks: int  # of this model
    disk_bytes: int  # of all models in the folder
    counts: TierCounts


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step, or while idle once per heartbeat."""

    steps: int  # finished since the process began
    received: int  # Submit commands taken in since the process began
    running: int  # sequences with a slot
    waiting: int  # sequences without one
    blocks_used: int
    blocks_total: int
    blocks_cached: int
    evictions: int
    guides_checked: int = 0  # since the process began: compiling one is progress, too
    records: list[StepRecord] = []  # steps finished since the last Stats
    fairness: FairnessReport | None = None  # about once a second
    routing: RoutingNews | None = None
    transfers: TransferStats | None = None  # of an engine with a role
    ranks: list[RankState] = []  # of an engine over several
    tiers: TierStats | None = None  # of an engine with KV tiers


class Finished(msgspec.Struct, frozen=True):
    """A request has ended; for a streamed one the samples repeat what the deltas said."""

    request_id: str
    samples: list[Sample]
    story: Story
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None  # as 32-bit floats, little end first: what OpenAI's base64 form holds


class Failure(msgspec.Struct, frozen=True):
    """Why a request ended without an answer. `refused`: the request itself is at fault, `of_guide`: its guide,
    `busy`: nobody is, its guide could not be compiled now. `retry_after_s`: nor here, its latency could not be
    promised."""

    message: str
    refused: bool = False
    of_guide: bool = False
    busy: bool = False
    retry_after_s: float | None = None


class EngineProgress(msgspec.Struct, frozen=True, tag="progress"):
    """One message per step, per refusal or per heartbeat: everything that is new for everyone."""

    stats: Stats
    deltas: list[Delta] = []
    finished: list[Finished] = []
    failed: list[tuple[str, Failure]] = []  # with the ids of their requests


class BlockMap(msgspec.Struct, frozen=True, tag="block_map"):
    """Who holds which KV block: an index into `owners` per block, -1 for free; and which hold a cached prefix."""

    owners: list[str]
    owner_of: list[int]
    cached: bytes  # one byte per block: 1 if a later request could share it


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine process ends."""

    message: str


Report = Ready | EngineProgress | BlockMap | AdapterReport | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode

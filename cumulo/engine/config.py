"""EngineConfig: every option of the engine, documented where it is defined. No environment switches."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cumulo.collectives.decide.measured import parse_choices, read_collective_profile
from cumulo.engine.decide.core.config import DEVICE_DEFAULTS, SchedulingOptions
from cumulo.engine.decide.rank_backend import BACKENDS
from cumulo.engine.decide.transfer.orders import named_address, parse_address
from cumulo.errors import CumuloError, require_least
from cumulo.layout.equal_sums import USUAL_PARTS
from cumulo.layout.serving import ServingLayout
from cumulo.spec.slo import Slo

_USUAL_LORAS = 8  # where adapters are named and max_loras is not


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulingOptions):
    """Options of the engine; those that the scheduler decides by are in SchedulingOptions."""

    device: str = "auto"  # auto: a GPU if there is one, else the CPU; or "cpu", "cuda"
    kv_blocks: int | None = None  # None: as many as kv_memory_gib holds
    kv_memory_gib: float | None = None  # None: chosen by the memory ledger from what is free
    max_context: int | None = None  # longest prompt + output; None: what the model was trained for
    # Blocks that leave the device's KV cache are kept in host memory, and from there on disk: docs/kv-tiers.md
    kv_host_gib: float = 0.0
    kv_disk: str = ""  # folder; engines of one host may share it
    kv_disk_gib: float = 0.0  # most that its files may take
    # Tokens are drafted and verified together: "ngram" drafts what followed the same words before; or the name of a
    # draft model with the same tokenizer, or the folder of an EAGLE-3 head. Empty: off
    speculate: str = ""
    overlap: bool = True  # plan step N+1 and finish N-1 while N runs
    threads: int | None = None  # CPU threads; None: torch's default
    dtype: str = "auto"  # of activations and KV; auto: float32 on a CPU, bfloat16 on a GPU
    # fp8, int4: the layers' matrices are quantised to 8 or 4 bits once loaded (GPU); routed experts, embedding and
    # head stay
    weights: Literal["auto", "fp8", "int4"] = "auto"
    # Keys and values take one byte a number: fp8, or on a CPU int8, with a scale for each head and token
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"
    batch_invariant: bool = False  # same request, same bits, whatever else is in the batch; slower (GPU)
    # With batch_invariant: one rank and this many, or each power of two up to it, give the same bits; 0: 4, or as
    # many ranks as a stage has. Engines that are compared need the same number
    invariant_tp: int = 0
    cuda_graphs: bool = True  # steps are captured and replayed; off: every kernel is launched by the host
    # -- low-rank adapters: docs/adapters.md
    max_lora_rank: int = 16  # the greatest rank that an adapter may have
    # -- over several ranks (processes): docs/serving-ranks.md
    tp: int = 1  # tensor parallel: heads, feed-forward width and vocabulary in this many slices
    # Expert parallel: experts are spread whole over all tp × dp ranks of a stage; alone, it also sets tp.
    ep: int = 1
    # Copies of experts that get most tokens, over all ranks of a stage: placed anew by load after so many steps
    redundant_experts: int = 0
    expert_balance_steps: int = 1000
    # Of several hosts: the last so many ranks are started there, with `cumulo serve --rank-of`, and come to this
    # HOST:PORT of rank 0's host; all of them have the same transfer_key
    remote_ranks: int = 0
    rank_address: str = ""
    # How ranks exchange numbers in a step: symmetric (GPUs of one host), nccl (GPUs of several), gloo (CPUs; slow
    # between GPUs); auto: by where the ranks are
    rank_backend: Literal["auto", "symmetric", "nccl", "gloo"] = "auto"
    # Which of our schedules add between CPU ranks of one host: all_reduce=ring; auto: the tuner's; empty: gloo
    collective: str = ""
    collective_profile: str = (
        ""  # a file of `cumulo bench collectives` that decides where `collective` does not
    )
    rank_timeout_s: float = 60.0  # a rank that the others wait for longer has hung: the engine ends
    # -- prefill and decode on engines of their own: docs/roles.md
    role: Literal["both", "prefill", "decode"] = "both"  # prefill: also computes prompts for decode engines
    transfer_address: str = ""  # where a prefill engine is reached: unix:PATH or tcp:HOST:PORT
    prefill_engines: tuple[str, ...] = ()  # of a decode engine: their addresses, each as NAME=ADDRESS
    transfer_key: str = ""  # that engines show each other
    transfer_stall_s: float = 10.0  # a transfer or a prefill engine that stands still for longer is given up
    seed: int = 0  # where requests without a seed of their own draw theirs

    @property
    def collective_text(self) -> str:
        """Algorithms and profile in one, as ranks are told."""
        profile = f"profile={self.collective_profile}" if self.collective_profile else ""
        return ",".join(part for part in (self.collective, profile) if part)

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                bounds = f"{least} to {most:,}" if most < _NO_BOUND else f"{least} or more"
                raise CumuloError(f"{name} must be a number, {bounds}; got {value}")
        parse_choices(self.collective)
        read_collective_profile(self.collective_profile)
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise CumuloError(
                    f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}; got {getattr(self, name)!r}"
                )
        if bool(self.kv_disk) != (self.kv_disk_gib > 0):
            raise CumuloError("kv_disk is a folder and needs kv_disk_gib, the most that its files may take")
        if self.invariant_tp and not self.batch_invariant:
            raise CumuloError(
                "invariant_tp says what batch_invariant adds up alike: add batch_invariant, or omit it"
            )
        require_least(
            self, 0, "shared_step_s", "rank_timeout_s", "transfer_stall_s", above=True, unit=" seconds"
        )
        if self.slo is not None and not isinstance(self.slo, Slo):
            raise CumuloError(f"slo must be a Slo, such as Slo(ttft_s=0.5, itl_s=0.04); got {self.slo!r}")
        if self.slo is not None and (self.slo.tpot_s is not None or self.slo.e2e_s is not None):
            raise CumuloError("a server can promise ttft and itl: remove tpot and e2e from the SLO")
        layout = self.layout  # which refuses sizes that do not belong together
        if self.redundant_experts and layout.ep == 1:
            raise CumuloError("redundant_experts copies experts among ranks: add ep, or omit it")
        if (self.remote_ranks > 0) != bool(self.rank_address) or not 0 <= self.remote_ranks < layout.world:
            raise CumuloError(
                f"remote_ranks ({self.remote_ranks}) is how many of the {layout.world} ranks of tp, pp, dp and ep "
                "come from other hosts, all but one at most, and needs a rank_address (HOST:PORT), where they join"
            )
        if self.rank_backend != "auto" and layout.world == 1:
            raise CumuloError(
                "rank_backend says how several ranks exchange numbers: add tp, pp, dp or ep, or omit it"
            )
        if self.remote_ranks and not self.transfer_key:
            raise CumuloError("ranks of other hosts need a key: give all of them the same --fleet-key-file")
        if (self.role == "prefill") != bool(self.transfer_address):
            raise CumuloError(
                "an engine with role=prefill needs a transfer_address, and only such an engine: unix:PATH for "
                "engines of this host, or tcp:HOST:PORT"
            )
        if (self.role == "decode") != bool(self.prefill_engines):
            raise CumuloError(
                "an engine with role=decode needs prefill_engines, and only such an engine: the addresses of the "
                "engines that compute its prompts"
            )
        for number, text in enumerate(self.prefill_engines):
            parse_address(named_address(text, number)[1])
        if self.transfer_address:
            parse_address(self.transfer_address)

    @property
    def sum_parts(self) -> int:
        """In how many parts a sum that ranks may share is added up in the batch-invariant mode, at most."""
        return self.invariant_tp or max(USUAL_PARTS, self.layout.stage_ranks)

    @property
    def layout(self) -> ServingLayout:
        """How the engine is spread over ranks."""
        alone = self.ep > 1 and self.tp == self.dp == 1
        return ServingLayout(self.ep if alone else self.tp, self.pp, self.dp, self.ep)

    def with_adapters(self, ranks: Sequence[int]) -> "EngineConfig":
        """With room for adapters of these ranks and, unless it says how many, for a few more."""
        if not ranks:
            return self
        if self.max_loras and self.max_loras < len(ranks):
            raise CumuloError(
                f"{len(ranks)} adapters were named, and max_loras is {self.max_loras}: set it higher"
            )
        most = self.max_loras or max(_USUAL_LORAS, len(ranks))
        return replace(self, max_loras=most, max_lora_rank=max(self.max_lora_rank, *ranks))

    def settled(self, kind: str) -> "EngineConfig":
        """With everything decided that depends on the kind of device, "cpu" or "cuda"."""
        chosen = {name: value for name, value in DEVICE_DEFAULTS[kind].items() if not getattr(self, name)}
        dtype = _DTYPES[kind] if self.dtype == "auto" else self.dtype
        settled = replace(self, device=kind, dtype=dtype, **chosen)  # type: ignore[arg-type]
        if kind == "cpu":
            if self.weights != "auto":
                raise CumuloError(f"weights={self.weights} needs a GPU; on a CPU, omit weights")
            if self.batch_invariant:
                raise CumuloError("batch_invariant needs a GPU; on a CPU, omit it")
        elif self.kv_dtype == "int8":
            raise CumuloError("kv_dtype=int8 is for the CPU engine; on a GPU, choose fp8")
        elif settled.block_size < 16 or settled.block_size & (settled.block_size - 1):
            raise CumuloError(
                f"block_size={settled.block_size} was asked for, but on a GPU it must be a power of two, 16 or "
                "more; choose one, or omit block_size"
            )
        return settled


_NO_BOUND = sys.float_info.max
_BOUNDS = {
    **dict.fromkeys(("block_size", "max_running", "max_tokens_per_step"), (0, _NO_BOUND)),
    **dict.fromkeys(("kv_memory_gib", "kv_host_gib", "kv_disk_gib", "redundant_experts"), (0, _NO_BOUND)),
    **dict.fromkeys(("kv_blocks", "max_context", "expert_balance_steps"), (1, _NO_BOUND)),
    "threads": (1, 1024),  # torch ends the process where it cannot start more
    "max_loras": (0, 4096),
    "max_lora_rank": (1, 4096),
    "invariant_tp": (0, 64),
}
_ALLOWED = {
    "slo_late": ("refuse", "queue"),
    "role": ("both", "prefill", "decode"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float64", "float32", "float16", "bfloat16"),
    "weights": ("auto", "fp8", "int4"),
    "kv_dtype": ("auto", "fp8", "int8"),
    "rank_backend": BACKENDS,
}
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}

"""Replica: one engine with the devices it runs on, as the simulator needs it. Made by
`cumulo simulate` and the search.

Its KV blocks are those the engine's own memory ledger would give it, and its limits the engine's own defaults.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from cumulo.base.quantities import GIB, quantity
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.config import BatchLimits
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.memory.memory_plan import MemoryPlan, plan_memory, plan_rank_memory, scheduler_config
from cumulo.engine.simulate.disk import SimulatedDisk
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.run import Arrival, Run
from cumulo.errors import ConfigError, OutOfMemory
from cumulo.layout.layout import local_spec
from cumulo.layout.pieces import served_elements
from cumulo.layout.serving import ServingLayout
from cumulo.plan.network.collectives import Network
from cumulo.plan.serve.profile import (
    Confidence,
    ServingProfile,
    confidence_of,
    profile_for,
    published_profile,
)
from cumulo.plan.serve.step_cost import StepCostModel
from cumulo.plan.serve.step_cost_work import BITS_OF_KV, Format, StepWork, check_split, step_work
from cumulo.spec.cluster import Cluster, Fabric
from cumulo.spec.device import Device, Node
from cumulo.spec.model import ModelSpec

CUMULO, TENSORRT_LLM = "cumulo", "tensorrt-llm"
_QUANTISED: dict[str, Literal["fp8", "int4"]] = {
    "float8": "fp8",
    "int4": "int4",
}  # by `cumulo serve --weights`
_DRIVER_BYTES = GIB // 2  # of a GPU's memory, taken before the engine asks how much is free
# That a thread reads files at, mostly the digest that it checks: 0.54 to 0.55 GB/s for blocks of 1 to 8 MiB, from
# the page cache, on a Neoverse-N1 (docs/simulate-serving.md). Writing them takes 1.5 times as long.
DISK_BYTES_PER_S = 0.5e9
_WRITING_TAKES = 1.5
_HEAD_VOCABULARY = 32_000  # tokens that published EAGLE-3 heads propose
FORMATS = {
    "bfloat16": Format(),
    "float8": Format(weights="float8", compute="float8"),
    "int4": Format(weights="int4"),
    "float4": Format(weights="float4", compute="float4"),
    "mxfp4": Format(experts="float4"),  # as GPT-OSS is published: its experts alone are quantised
    "float32": Format("float32", "float32", "float32", "float32", "float32", "float32"),
    # The built-in model, on a CPU.
    "q4_1": Format("q4_1", "float32", "q8_0", "float32", "float32", "float32"),
}


@cache
def _form(weights: str, kv: str, own: bool) -> Format:
    if weights not in FORMATS:
        raise ConfigError(f"weights must be one of {', '.join(FORMATS)}; got {weights!r}")
    form = FORMATS[weights]
    if not own and form.experts == "bfloat16":  # Cumulo's engine leaves routed experts as they are
        form = replace(form, experts=form.weights)
    return replace(form, kv=kv) if kv else form


# Of a replica as of its engine.
_ENGINE_OPTIONS = (
    "max_context", "max_running", "max_tokens_per_step", "prefix_cache", "kv_host_gib", "kv_disk", "kv_disk_gib",
    "pp", "max_loras", "max_lora_rank",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replica(BatchLimits):
    spec: ModelSpec
    node: Node
    fabric: Fabric
    tp: int = 1
    ep: int = 1  # experts over this many of the tp ranks; 1: every expert is cut like the other matrices
    weights: str = "bfloat16"
    kv: str = ""  # number format of keys and values; empty: that of activations
    engine: str = CUMULO  # or TENSORRT_LLM, whose published throughputs are known
    max_context: int | None = None  # prompt and answer; None: what the model was made for
    prefix_cache: bool = True
    kv_host_gib: float = 0.0  # host memory for prefixes that leave the device
    kv_disk: str = ""  # folder for prefixes that leave host memory
    kv_disk_gib: float = 0.0  # of this engine: engines of a host share a folder
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    pp: int = 1  # layers over this many stages, of tp ranks each
    acceptance: float = 0.0  # speculation: how often a drafted token is right; 0: none are drafted
    speculate: str = "ngram"  # with acceptance: what drafts, or the folder of a head
    max_loras: int = 0  # adapters in memory, asked for equally often
    max_lora_rank: int = 16
    # Engines that share the experts, of which this is one; each has attention, dense layers and requests of its own
    dp: int = 1
    front_door_s: float = 0.0  # of a request outside the engine: HTTP, tokenization, to the engine and back

    @property
    def ranks(self) -> int:
        """Processes of one engine, each on a device of its own."""
        return self.tp * self.pp

    @property
    def device(self) -> Device:
        return self.node.device

    @property
    def form(self) -> Format:
        return _form(self.weights, self.kv, self.engine == CUMULO)

    @property
    def profile(self) -> ServingProfile:
        return profile_for(self.device) if self.engine == CUMULO else published_profile()

    @property
    def confidence(self) -> Confidence:
        kind: Literal["dense", "mixture"] = "dense" if self.spec.moe is None else "mixture"
        return confidence_of(self.device, self.ranks * self.dp, self.engine == CUMULO, kind)

    @property
    def price_per_hour(self) -> float:
        return self.ranks * self.device.price_per_hour

    def work(self) -> StepWork:
        """Of one tensor-parallel rank, over all stages."""
        if self.ep not in (1, self.tp):
            raise ConfigError(f"ep must be 1 or {self.tp}, the number of GPUs of the replica; got {self.ep}")
        work, mla = step_work(self.spec, self.form, self.tp, self.expert_ranks), self.spec.mla
        if self.engine == CUMULO or mla is None:
            return work
        # Others expand a prompt's keys and values from the latent: fewer FLOPs than on the latent itself.
        wide = mla.nope_head_dim + mla.rope_head_dim + mla.value_head_dim
        return replace(
            work, attention_flops_per_pair=2 * wide * self.spec.layers * self.spec.heads // self.tp
        )

    @property
    def expert_ranks(self) -> int:
        return self.dp if self.dp > 1 else self.ep

    def engine_config(self) -> EngineConfig:
        on_cpu = self.device.generation == "cpu"
        return EngineConfig(
            device="cpu" if on_cpu else "cuda",
            weights=_QUANTISED.get(self.weights, "auto"),
            kv_dtype="fp8" if self.kv == "float8" else "auto",
            speculate=self.speculate if self.acceptance else "",
            **{name: getattr(self, name) for name in _ENGINE_OPTIONS},
        ).settled("cpu" if on_cpu else "cuda")

    def memory(self) -> MemoryPlan:
        """What the engine's ledger says of one rank; raises OutOfMemory, with what would fit, where it does
        not."""
        try:
            return self._memory()
        except OutOfMemory as error:
            held = quantity(self.work().held_bytes / self.pp, "B")
            more = self._smallest_that_fits() if self.pp == 1 else None
            advice = f"; tp {more} would fit" if more else ""
            raise OutOfMemory(
                f"{self.weights} weights over {self.ranks} × {self.device.name} take {held} of "
                f"{quantity(float(self.device.memory_bytes), 'B')} each{advice}: {error}"
            ) from error

    def _memory(self) -> MemoryPlan:
        free = self.device.memory_bytes - (0 if self.device.generation == "cpu" else _DRIVER_BYTES)
        held, loading = self.work().held_bytes, 0
        if (
            self.weights in _QUANTISED and self.engine == CUMULO
        ):  # it loads weights as they are, and then quantises
            loading = step_work(self.spec, FORMATS["bfloat16"], self.tp, self.expert_ranks).held_bytes
        check_split(self.spec, self.tp, self.expert_ranks)
        if self.pp > 1:
            whole = step_work(self.spec, self.form).held_bytes
            layout = ServingLayout(self.tp, self.pp, ep=self.ep)
            return plan_rank_memory(self.spec, whole, self.engine_config(), layout, free)
        spec = local_spec(self.spec, self.tp, self.expert_ranks)
        return plan_memory(spec, held, self.engine_config(), free, loading_bytes=loading)

    def _smallest_that_fits(self) -> int | None:
        """More tensor-parallel ranks, up to as many as there are heads."""
        tp = 2 * self.tp
        while tp <= self.spec.heads and self.spec.heads % tp == 0:
            try:
                replace(self, tp=tp, ep=tp if self.ep > 1 else 1)._memory()
            except (OutOfMemory, ConfigError):
                tp *= 2
            else:
                return tp
        return None

    def scheduler(self) -> Scheduler:
        """The engine's own."""
        scheduler = Scheduler(scheduler_config(self.engine_config(), self.memory()))
        if scheduler.tiers is not None:  # what a real engine measures before it is ready
            scheduler.costs.swap_s_per_block = self.block_bytes / self.device.host_bytes_per_s
        return scheduler

    @property
    def block_bytes(self) -> float:
        """Of a KV block, on one rank."""
        return self.engine_config().block_size * self.work().kv_bytes_per_token

    def engine_of(self, scheduler: Scheduler, cost: StepCostModel) -> SimulatedEngine:
        """One that plays the steps of this scheduler."""
        disk = None
        if self.kv_disk:
            read_s = self.block_bytes / self.disk_bytes_per_s
            most = int(self.kv_disk_gib * GIB / self.block_bytes)
            disk = SimulatedDisk(read_s, _WRITING_TAKES * read_s, most)
        return SimulatedEngine(
            scheduler, cost, acceptance=self.acceptance, head_pass_s=self.head_pass_s, disk=disk
        )

    @property
    def head_pass_s(self) -> float:
        """The time of a head that drafts in rounds, on a GPU, for one place; 0 without one. An EAGLE-3 head (Li et
        al. 2025) is one layer, whose attention sees hidden state and token side by side, and an output matrix of
        the most frequent tokens, all in 16 bits. For one place all of it is read once."""
        if not self.acceptance or self.speculate == "ngram":
            return 0.0
        spec, profile = self.spec, self.profile
        width = spec.heads * spec.head_dim
        attention = 2 * spec.hidden * (width + 2 * spec.kv_heads * spec.head_dim) + width * spec.hidden
        output = spec.hidden * min(spec.vocab_size, _HEAD_VOCABULARY)
        parameters = attention + 3 * spec.hidden * spec.ffn_hidden + output
        reached = profile.products.get("bfloat16") or next(iter(profile.products.values()))
        return 2 * parameters / (self.device.memory_bytes_per_s * reached.bandwidth) + profile.layer_s

    def cost(self, slower: float = 1.0) -> StepCostModel:
        return self.cost_under(self.profile, slower)

    def cost_under(self, profile: ServingProfile, slower: float = 1.0) -> StepCostModel:
        """Under constants other than the device's own: those that never saw it."""
        tensor = expert = stages = None
        nodes = 1
        if self.ranks > 1:
            network = Network(Cluster(self.node, self.ranks, self.fabric))
            tensor = network.group(self.tp) if self.tp > 1 else None
            expert = tensor if self.ep > 1 else None
            stages = network.group(self.pp, stride=self.tp) if self.pp > 1 else None
        if self.dp > 1:
            expert = Network(Cluster(self.node, self.dp, self.fabric)).group(self.dp)
            nodes = -(-self.dp // self.node.scale_up_gpus)
        return StepCostModel(
            self.work(), self.device, profile, weights=self.form.weights, compute=self.form.compute,
            experts_in=self.form.experts, tensor=tensor, expert=expert, stages=stages, spread=self.dp,
            expert_nodes=nodes, block_size=self.engine_config().block_size, slower=slower, adapters=self.max_loras,
            adapter_bytes=self._adapter_bytes,
        )  # fmt: skip

    @property
    def _adapter_bytes(self) -> float:
        """Of one adapter, on one rank."""
        if not self.max_loras:
            return 0.0
        elements = served_elements(local_spec(self.spec, self.tp, self.ep), self.max_lora_rank)
        return elements * BITS_OF_KV[self.form.activations] / 8

    def serve(
        self, arrivals: tuple[Arrival, ...], slower: float = 1.0, itl_bound_s: float | None = None
    ) -> tuple[Run, StepCostModel]:
        """Play traffic; the cost model comes back knowing where the time went. `itl_bound_s`: by which requests
        are judged later."""
        cost = self.cost(slower=slower)
        engine = self.engine_of(self.scheduler(), cost)
        engine.arrivals, engine.run.itl_bound_s = list(arrivals), itl_bound_s
        engine.advance(float("inf"))
        return engine.end(), cost

    def one_of(self, replicas: int) -> "Replica":
        """One of so many replicas: those of a host share the disk's folder, of which each is given its part."""
        on_host = min(replicas, max(1, self.node.gpus // self.ranks))
        return replace(self, kv_disk_gib=self.kv_disk_gib / on_host) if self.kv_disk else self

    def without_options(self) -> "Replica":
        """No KV blocks beyond the device."""
        return replace(self, kv_host_gib=0.0, kv_disk="", kv_disk_gib=0.0, disk_bytes_per_s=DISK_BYTES_PER_S)

    def with_context_for(self, arrivals: tuple[Arrival, ...]) -> "Replica":
        """With room for the longest request, so that none is refused and no memory is planned for longer ones."""
        longest = max(one.prompt_tokens + one.output_tokens for one in arrivals)
        if longest > self.spec.max_context:
            raise ConfigError(
                f"a request of this traffic has {longest:,} tokens with its answer; the model supports "
                f"{self.spec.max_context:,}: shorten prompts or answers"
            )
        return replace(self, max_context=longest)

    def roomy_context(self) -> int:
        """To serve with: a sample's longest request is not the longest that will ever come. The next power of
        two, where model and KV cache hold that."""
        longest = self.max_context or self.spec.max_context
        roomy = min(1 << (longest - 1).bit_length(), self.spec.max_context)
        try:
            replace(self, max_context=roomy)._memory()
        except OutOfMemory:
            return longest
        return roomy

    @property
    def extras(self) -> tuple[str, ...]:
        """Options that a plain replica does not have, as `cumulo serve` takes them."""
        named = {
            "--kv-host-gib": f"{self.kv_host_gib:g}" if self.kv_host_gib else "",
            "--kv-disk": self.kv_disk and f"{self.kv_disk}:{self.kv_disk_gib:g}",
            "--speculate": self.speculate if self.acceptance else "",
        }
        return tuple(f"{name} {value}" for name, value in named.items() if value)

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep))
        shares = f", experts shared by {self.dp}" if self.dp > 1 else ""
        split = " ".join(f"{name}{size}" for name, size in sizes if size > 1)
        numbers = self.weights + (f", {self.kv} KV" if self.kv else "")
        numbers += shares + ("" if self.engine == CUMULO else f", {self.engine}")
        numbers += f", {self.max_loras} adapters" if self.max_loras else ""
        numbers += "".join(f", {words}" for words in self.extras)
        if not split:
            return f"{self.device.name} ({numbers})"
        return f"{self.ranks} × {self.device.name} ({split}, {numbers})"

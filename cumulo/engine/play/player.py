"""Player: a decoder with its KV cache and the runner that plays plans on it. Made by
the assembly; the GPU's parts are imported only where a GPU is used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.plan import Runner
from cumulo.engine.decide.speculation.choose import most_draws
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.memory.memory_plan import MemoryPlan
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.errors import CumuloError
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.files import AdapterWeights
from cumulo.models.batch import KVCache, RunnableModel
from cumulo.models.decoder import Decoder
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.models.play.rank_links import RankLinks
from cumulo.spec.gpu_kernels import adapter_obstacle_of
from cumulo.spec.model import ModelSpec

if TYPE_CHECKING:  # they need Triton
    from cumulo.engine.play.rank_play import DeviceRank
    from cumulo.engine.play.runner_cuda import CudaRunner


class DeviceRunner(Runner, Protocol):
    """A runner on a device, whose memory can be measured."""

    @property
    def pool(self) -> SwapPool | None:
        """The host memory that its blocks are swapped with."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """What it holds, by the names of the memory ledger's rows."""
        ...

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """Peak bytes of a step of this size beyond what is held; None where it works in what is held."""
        ...

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Make whatever steps would otherwise make, and wait for, when they first need it."""
        ...

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot that no sequence refers to."""
        ...


@dataclass(frozen=True, slots=True)
class Player:
    runner: DeviceRunner
    runs_on: str  # in words: which code computes


def make_player(
    decoder: Decoder,
    config: EngineConfig,
    memory: MemoryPlan,
    eos_ids: tuple[int, ...],
    guidance: Guidance | None,
    tell: Callable[[str], None] | None,
) -> Player:
    """On the device that the configuration names."""
    bank = None
    if config.max_loras:
        bank = AdapterBank(decoder, decoder.spec, config.max_loras, config.max_lora_rank)
    device = decoder.final_norm.weight.device
    own = {"overlap": config.overlap, "threads": config.threads, "guidance": guidance, "bank": bank}
    if config.device != "cuda":
        model, runs_on = runnable(decoder)
        cache = kv_cache(decoder.spec, config, memory, decoder.dtype, device=device)
        return Player(torch_runner(model, cache, config, memory, eos_ids, **own), runs_on)
    from cumulo.models.play import cuda_decoder

    name = torch.cuda.get_device_name()
    obstacle = cuda_decoder.why_not(decoder) or adapter_obstacle(config, decoder.spec)
    if obstacle is not None:
        refuse_kernel_options(config, obstacle)
        if config.speculate not in ("", "ngram"):
            raise CumuloError(
                f"speculate={config.speculate} was asked for, but this model runs on PyTorch operators, which "
                f"draft on a CPU only ({obstacle}); use speculate=ngram, or choose device=cpu"
            )
        cache = kv_cache(decoder.spec, config, memory, decoder.dtype, device=device)
        runner = torch_runner(decoder, cache, config, memory, eos_ids, **own)
        return Player(runner, f"PyTorch operators on {name}: {obstacle}")
    if tell is not None:
        tell("preparing the GPU")
    on_gpu = cuda_runner(decoder, decoder.spec, config, memory, eos_ids, device, guidance=guidance, bank=bank)
    return Player(on_gpu, f"GPU kernels on {name}")


def cuda_runner(
    decoder: Decoder,
    spec: ModelSpec,
    config: EngineConfig,
    memory: MemoryPlan,
    eos_ids: tuple[int, ...],
    device: torch.device,
    *,
    guidance: Guidance | None = None,
    rank: "DeviceRank | None" = None,
    **parts: Any,
) -> "CudaRunner":
    """`spec`: of what is computed here; `parts`: what CudaDecoder does for adapters or with other ranks."""
    from cumulo.engine.play.runner_cuda import CudaRunner
    from cumulo.models.play.cuda_decoder import CudaDecoder

    model = CudaDecoder(
        decoder,
        config.max_tokens_per_step,
        most_draws(config.max_running, bool(config.speculate)),
        weights=config.weights,
        batch_invariant=config.batch_invariant,
        sum_parts=config.sum_parts,
        **parts,
    )
    return CudaRunner(
        model,
        kv_cache(spec, config, memory, decoder.dtype, device=device),
        max_slots=config.max_running,
        max_context=memory.max_context,
        eos_token_ids=eos_ids,
        host_blocks=memory.tier_blocks,
        guidance=guidance,
        graphs=config.cuda_graphs and config.rank_backend != "gloo",  # whose messages the host sends
        rank=rank,
    )


def refuse_kernel_options(config: EngineConfig, obstacle: str) -> None:
    """Options that only the GPU's kernels have must not be dropped in silence."""
    for name, usual in (("weights", "auto"), ("kv_dtype", "auto"), ("batch_invariant", False)):
        value = getattr(config, name)
        if value != usual:
            raise CumuloError(
                f"{name}={value} was asked for, but this model runs on PyTorch operators, which do not have it "
                f"({obstacle}); leave {name} out"
            )


def adapter_obstacle(config: EngineConfig, spec: ModelSpec) -> str | None:
    """What keeps the GPU's kernels from adding adapters to a model, or None."""
    return adapter_obstacle_of(spec) if config.max_loras else None


def torch_runner(
    model: RunnableModel,
    cache: KVCache,
    config: EngineConfig,
    memory: MemoryPlan,
    eos_ids: tuple[int, ...],
    **own: Any,
) -> TorchRunner:
    """A TorchRunner; `own` is what ranks of an engine do not have alike."""
    return TorchRunner(
        model,
        cache,
        max_slots=config.max_running,
        max_context=memory.max_context,
        eos_token_ids=eos_ids,
        host_blocks=memory.tier_blocks,
        **own,
    )


def kv_cache(
    spec: ModelSpec, config: EngineConfig, memory: MemoryPlan, dtype: torch.dtype, **where: Any
) -> KVCache:
    """The cache of one rank, whose part of the model `spec` is; `dtype`: of activations."""
    if config.kv_dtype == "int8" and spec.mla is not None:
        raise CumuloError(
            "kv_dtype=int8 does not store latent attention, whose values are a part of the keys; choose fp8"
        )
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(config.kv_dtype, dtype)
    return KVCache(spec, memory.kv_blocks // config.dp, config.block_size, dtype, **where)


def runnable(
    decoder: Decoder, on_ranks: Callable[[], RunnableModel] | None = None, links: RankLinks | None = None
) -> tuple[RunnableModel, str]:
    """What computes a decoder on a CPU, and in which words: fused kernels, or operators (of several ranks, those
    that `on_ranks` makes)."""
    obstacle = why_not(decoder)
    if obstacle is None:
        return FusedDecoder(decoder, links), "fused native kernels"
    return on_ranks() if on_ranks is not None else decoder, f"PyTorch operators: {obstacle}"

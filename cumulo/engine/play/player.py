"""Player: a decoder with its KV cache and the runner that plays plans on it. Made by
the assembly; the GPU's parts are imported only where a GPU is used."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.plan import Runner
from cumulo.engine.decide.speculation.choose import most_draws
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.memory.memory_plan import MemoryPlan
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import CumuloError
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.adapters.files import AdapterWeights
from cumulo.models.batch import KVCache, RunnableModel
from cumulo.models.decoder import Decoder
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.models.play.rank_links import RankLinks
from cumulo.spec.gpu_kernels import adapter_obstacle_of
from cumulo.spec.model import ModelSpec


class DeviceRunner(Runner, Protocol):
    """A runner on a device, whose memory and swaps can be measured."""

    def memory_bytes(self) -> dict[str, int]:
        """What it holds, by the names of the memory ledger's rows."""
        ...

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """Peak bytes of a step of this size beyond what is held; None where it works in what is held."""
        ...

    def measure_swap_s(self) -> float:
        """Seconds to move one block to the host pool."""
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
    if config.device != "cuda":
        on_cpu, runs_on = runnable(decoder)
        return Player(_torch_runner(on_cpu, decoder, config, memory, eos_ids, guidance), runs_on)
    from cumulo.engine.play.runner_cuda import CudaRunner
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
        runner = _torch_runner(decoder, decoder, config, memory, eos_ids, guidance)
        return Player(runner, f"PyTorch operators on {name}: {obstacle}")
    if tell is not None:
        tell("preparing the GPU")
    model = cuda_decoder.CudaDecoder(
        decoder,
        config.max_tokens_per_step,
        most_draws(config.max_running, bool(config.speculate)),
        weights=config.weights,
        batch_invariant=config.batch_invariant,
        bank=_bank(decoder, config),
        sum_parts=config.sum_parts,
    )
    cache = KVCache(
        decoder.spec,
        memory.kv_blocks,
        config.block_size,
        kv_dtype(config, decoder.dtype),
        decoder.final_norm.weight.device,
    )
    cuda_runner = CudaRunner(
        model,
        cache,
        max_slots=config.max_running,
        max_context=memory.max_context,
        eos_token_ids=eos_ids,
        host_blocks=memory.tier_blocks,
        guidance=guidance,
        graphs=config.cuda_graphs,
    )
    return Player(cuda_runner, f"GPU kernels on {name}")


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


def runner_maker(
    config: EngineConfig, memory: MemoryPlan, eos_ids: tuple[int, ...]
) -> "partial[TorchRunner]":
    """A TorchRunner as far as all ranks of an engine have it alike, one or several."""
    return partial(
        TorchRunner,
        max_slots=config.max_running,
        max_context=memory.max_context,
        eos_token_ids=eos_ids,
        host_blocks=memory.tier_blocks,
    )


def runnable(
    decoder: Decoder, on_ranks: Callable[[], RunnableModel] | None = None, links: RankLinks | None = None
) -> tuple[RunnableModel, str]:
    """What computes a decoder on a CPU, and in which words: fused kernels, or operators (of several ranks, those
    that `on_ranks` makes)."""
    obstacle = why_not(decoder)
    if obstacle is None:
        return FusedDecoder(decoder, links), "fused native kernels"
    return on_ranks() if on_ranks is not None else decoder, f"PyTorch operators: {obstacle}"


def _bank(decoder: Decoder, config: EngineConfig) -> AdapterBank | None:
    if not config.max_loras:
        return None
    return AdapterBank(decoder, decoder.spec, config.max_loras, config.max_lora_rank)


def _torch_runner(
    model: RunnableModel,
    decoder: Decoder,
    config: EngineConfig,
    memory: MemoryPlan,
    eos_ids: tuple[int, ...],
    guidance: Guidance | None,
) -> TorchRunner:
    refuse_latent_int8(config, decoder.spec)
    cache = KVCache(
        decoder.spec,
        memory.kv_blocks,
        config.block_size,
        kv_dtype(config, decoder.dtype),
        decoder.final_norm.weight.device,
    )
    return runner_maker(config, memory, eos_ids)(
        model,
        cache,
        overlap=config.overlap,
        threads=config.threads,
        guidance=guidance,
        bank=_bank(decoder, config),
    )


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The number format of keys and values, where activations are in `dtype`."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(config.kv_dtype, dtype)


def refuse_latent_int8(config: EngineConfig, spec: ModelSpec) -> None:
    if config.kv_dtype == "int8" and spec.mla is not None:
        raise CumuloError(
            "kv_dtype=int8 does not store latent attention, whose values are a part of the keys; choose fp8"
        )

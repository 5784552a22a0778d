"""Assembly: from a model's name to a running engine, in the order a reader would expect. Called by LLM.

Inspect the files → plan memory (or refuse) → load weights → choose the decoder → cache, runner, scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.engine import Engine
from cumulo.engine.guided import Guidance
from cumulo.engine.ledger import Ledger, MemoryPlan, plan_memory
from cumulo.engine.machine_memory import available_memory
from cumulo.engine.runner_torch import TorchRunner
from cumulo.engine.scheduler import Scheduler
from cumulo.engine.scheduler_config import SchedulerConfig
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.fused import FusedDecoder, why_not
from cumulo.models.load import LoadedModel, ModelFiles, inspect_model, load_model


@dataclass(frozen=True, slots=True)
class Assembly:
    model: LoadedModel
    memory: MemoryPlan
    engine: Engine
    runner: TorchRunner
    runs_on: str

    def ledger(self) -> Ledger:
        """The memory plan with what is now held beside it."""
        return self.memory.ledger.measured({k: v for k, v in self.runner.memory_bytes().items() if v})

    def ledger_of_a_full_step(self, config: EngineConfig) -> Ledger:
        """The same, with the peak of the largest steps the configuration allows. For an idle engine."""
        draws = min(config.max_running, config.max_tokens_per_step)
        measured = {
            "activations": self.runner.measure_step(config.max_tokens_per_step, 1),
            "logits": self.runner.measure_step(draws, draws),
        }
        self.engine.scheduler.pool.clear_cache()  # the steps wrote nonsense into blocks
        return self.ledger().measured(measured)


def assemble(
    model: str | Path | None,
    config: EngineConfig,
    keep_quantised: bool,
    progress: Callable[[str, int, int], None] | None,
) -> Assembly:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, "float32" if config.dtype == "auto" else config.dtype)
    files = inspect_model(model)
    keep_quantised = keep_quantised and dtype == torch.float32  # the packed kernels compute in float32
    memory = plan_memory(files.spec, held_bytes(files, dtype, keep_quantised), config, available_memory())
    loaded = load_model(
        model,
        dtype=dtype,
        keep_quantised=keep_quantised,
        progress=None if progress is None else lambda done, total: progress("loading weights", done, total),
    )
    obstacle = why_not(loaded.decoder)
    decoder: Decoder | FusedDecoder = loaded.decoder if obstacle else FusedDecoder(loaded.decoder)
    runs_on = f"PyTorch operators: {obstacle}" if obstacle else "fused native kernels"
    guidance = None
    if loaded.tokenizer is not None:
        guidance = Guidance(loaded.tokenizer, loaded.spec.vocab_size, loaded.eos_ids)
    cache = KVCache(loaded.spec, memory.kv_blocks, config.block_size, dtype)
    runner = TorchRunner(
        decoder,
        cache,
        max_slots=config.max_running,
        max_context=memory.max_context,
        eos_token_ids=loaded.eos_ids,
        host_blocks=memory.host_blocks,
        overlap=config.overlap,
        threads=config.threads,
        guidance=guidance,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            blocks=memory.kv_blocks,
            block_size=config.block_size,
            max_context=memory.max_context,
            max_running=config.max_running,
            max_tokens_per_step=config.max_tokens_per_step,
            prefix_cache=config.prefix_cache,
            preemption=config.preemption,
            host_blocks=memory.host_blocks,
            priority_step_s=config.priority_step_s,
        )
    )
    if memory.host_blocks:
        scheduler.costs.swap_s_per_block = runner.measure_swap_s()
    engine = Engine(
        scheduler,
        runner,
        loaded.tokenizer,
        vocab_size=loaded.spec.vocab_size,
        eos_ids=loaded.eos_ids,
        overlap=config.overlap,
        seed=config.seed,
        guidance=guidance,
    )
    return Assembly(loaded, memory, engine, runner, runs_on)


def held_bytes(files: ModelFiles, dtype: torch.dtype, keep_quantised: bool) -> int:
    """What the weights will take in memory: quantised blocks as they are or expanded, the rest in `dtype`."""
    plain = files.parameters - files.quantised_parameters
    if keep_quantised:
        return files.quantised_bytes + plain * dtype.itemsize
    return files.parameters * dtype.itemsize

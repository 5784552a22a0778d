"""Assembly: from a model's name to a running engine, in the order a reader would expect. Called by LLM.

Inspect the files → plan memory (or refuse) → load weights → choose the decoder → cache, runner, scheduler.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from cumulo.base.files import weights_digest
from cumulo.base.machine import LEAST_CPU_RANKS, available_memory
from cumulo.base.quantities import GIB
from cumulo.base.report import available_cores
from cumulo.engine.adapters import AdapterStore
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.rank_backend import RankPlaces, choose_backend
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import named_addresses
from cumulo.engine.engine import Engine
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.memory.ledger import Ledger
from cumulo.engine.memory.memory_plan import (
    KV_LIMIT_BYTES,
    MemoryPlan,
    plan_memory,
    plan_rank_memory,
    scheduler_config,
)
from cumulo.engine.memory.needs import DraftNeeds, quantised_saved_bytes
from cumulo.engine.play.disk_tier import KvFiles, TierMover, kv_fingerprint
from cumulo.engine.play.draft_source import attach_draft, check_tokenizer, load_draft
from cumulo.engine.play.player import Player, adapter_obstacle, make_player, refuse_kernel_options
from cumulo.engine.play.rank_player import RankSetup, start_ranks
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.engine.play.transfer_wire import RankCaches, SentCache
from cumulo.errors import ConfigError, CumuloError
from cumulo.kernels.cuda.registry import gpu_memory
from cumulo.layout.equal_sums import invariant_ep
from cumulo.layout.expert_placement import copies_problem
from cumulo.layout.serving import serving_problems
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.files.load import LoadedModel, ModelFiles, inspect_model, load_model
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.ranks.device_group import has_nccl
from cumulo.ranks.rank_group import THIS_HOST, meeting_point
from cumulo.ranks.rank_meter import RankTable
from cumulo.ranks.remote import host_and_port
from cumulo.spec.gpu_kernels import obstacle_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    model: LoadedModel
    config: EngineConfig  # with everything decided that was left to the device
    memory: MemoryPlan
    engine: Engine
    player: Player

    @property
    def runs_on(self) -> str:
        return self.player.runs_on

    def ledger(self) -> Ledger:
        """The memory plan with what is now held beside it."""
        return self.memory.ledger.measured({k: v for k, v in self.player.runner.memory_bytes().items() if v})

    def ledger_of_a_full_step(self) -> Ledger:
        """The same, with the peak of the largest steps the configuration allows. For an idle engine."""
        config = self.config
        draws = min(config.max_running, config.max_tokens_per_step)
        measured = {
            "activations": self.player.runner.measure_step(config.max_tokens_per_step, 1),
            "logits": self.player.runner.measure_step(draws, draws),
        }
        self.engine.scheduler.pool.clear_cache()  # the steps wrote nonsense into blocks
        return self.ledger().measured(measured)


def assemble(
    model: str | Path | None,
    config: EngineConfig,
    keep_quantised: bool,
    progress: Callable[[str, int, int], None] | None,
    with_tokenizer: bool = True,
) -> Assembly:
    """Raises OutOfMemory or ModelError before anything large is done. Without a tokenizer prompts are token ids."""
    config = config.settled(device_kind(config.device))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = torch_dtype(config)
    files = inspect_model(model)
    obstacle = obstacle_of(files.spec, config.dtype) if config.device == "cuda" else None
    if config.device == "cuda":
        obstacle = obstacle or adapter_obstacle(config, files.spec)
    if obstacle is not None:
        refuse_kernel_options(config, obstacle)
    # The packed kernels compute in float32 on a CPU; a GPU gets plain matrices, or quantises its own.
    keep_quantised = keep_quantised and dtype == torch.float32 and config.device == "cpu"
    loading_bytes = held_bytes(files, dtype, keep_quantised)
    tell = None if progress is None else lambda what: progress(what, 0, 0)
    load = partial(
        load_model,
        model,
        dtype=dtype,
        device=config.device,
        keep_quantised=keep_quantised,
        with_tokenizer=with_tokenizer,
        progress=None if progress is None else lambda done, total: progress("loading weights", done, total),
    )
    if config.max_loras and config.layout.world > 1 and config.device == "cuda":
        raise ConfigError(
            "adapters on several GPUs are not served yet: omit tp, pp, dp and ep, or omit max_loras"
        )
    if config.batch_invariant:
        config = replace(config, ep=invariant_ep(files.spec, config.layout))
    if config.layout.world > 1 and config.speculate:
        raise ConfigError("speculate runs on one rank: omit tp, pp, dp and ep, or omit speculate")
    if config.layout.world > 1 and config.kv_disk:
        raise ConfigError(
            "kv_disk needs an engine on one rank: omit tp, pp, dp and ep, or use kv_host_gib alone"
        )
    if config.role != "both" and (problem := _why_no_role(config)):
        raise ConfigError(
            f"prefill and decode engines {problem}; or use engines that do both: omit role, prefill and decode"
        )
    if config.layout.world > 1:
        return _assemble_ranks(files, config, loading_bytes, keep_quantised, with_tokenizer, load, tell)
    draft = load_draft(config, files.spec, dtype, keep_quantised)
    needs = None if draft is None else draft.needs(dtype.itemsize, config.device == "cuda")
    memory = _planned(files, config, keep_quantised, free_memory(config), needs)
    loaded = load()
    engine, player = start_engine(loaded.decoder, config, memory, loaded.tokenizer, loaded.eos_ids, tell)
    if draft is not None:
        check_tokenizer(draft, loaded.tokenizer)
        attach_draft(draft, player.runner, loaded.decoder)
    made = _complete(files, config, loaded, memory, engine, player, tell)
    if config.kv_disk:
        engine.mover = _mover(engine, player, config, files)
    return made


def predict_memory(files: ModelFiles, config: EngineConfig, available_bytes: int | None = None) -> MemoryPlan:
    """What an engine of this model would take, from headers alone; raises OutOfMemory where it does not fit.
    `available_bytes`: what engines of several models may take together, of which one fills no GPU; None: all that
    is free, for one model."""
    config = config.settled(device_kind(config.device))
    if available_bytes is None:
        available_bytes = free_memory(config)
    elif config.device == "cuda" and config.kv_blocks is None and config.kv_memory_gib is None:
        config = replace(config, kv_memory_gib=min(available_bytes / 4, KV_LIMIT_BYTES) / GIB)
    keep_quantised = torch_dtype(config) == torch.float32 and config.device == "cpu"
    return _planned(files, config, keep_quantised, available_bytes)


def _planned(
    files: ModelFiles,
    config: EngineConfig,
    keep_quantised: bool,
    available_bytes: int,
    draft: DraftNeeds | None = None,
) -> MemoryPlan:
    dtype = torch_dtype(config)
    loading_bytes = held_bytes(files, dtype, keep_quantised)
    saved_bytes = quantised_saved_bytes(files.spec, dtype.itemsize, config.weights)
    return plan_memory(
        files.spec,
        loading_bytes - saved_bytes,
        config,
        available_bytes,
        loading_bytes=loading_bytes,
        draft=draft,
    )


def start_engine(
    decoder: Decoder,
    config: EngineConfig,
    memory: MemoryPlan,
    tokenizer: Tokenizer | None = None,
    eos_ids: tuple[int, ...] = (),
    tell: Callable[[str], None] | None = None,
) -> tuple[Engine, Player]:
    """An engine for a decoder that is in place, whatever its weights came from."""
    guidance = Guidance(tokenizer, decoder.spec.vocab_size, eos_ids) if tokenizer is not None else None
    decoder.rotary.serve(memory.max_context)
    player = make_player(decoder, config, memory, eos_ids, guidance, tell)
    engine = _engine(player, config, memory, tokenizer, eos_ids, decoder.spec.vocab_size, guidance)
    return engine, player


def _engine(
    player: Player,
    config: EngineConfig,
    memory: MemoryPlan,
    tokenizer: Tokenizer | None,
    eos_ids: tuple[int, ...],
    vocabulary: int,
    guidance: Guidance | None,
) -> Engine:
    scheduler = Scheduler(scheduler_config(config, memory))
    if player.runner.pool is not None:
        scheduler.costs.swap_s_per_block = player.runner.pool.measure_s()
    return Engine(
        scheduler,
        player.runner,
        tokenizer,
        vocab_size=vocabulary,
        eos_ids=eos_ids,
        overlap=config.overlap,
        seed=config.seed,
        guidance=guidance,
        depth=config.pp,
    )


def _assemble_ranks(
    files: ModelFiles,
    config: EngineConfig,
    weight_bytes: int,
    keep_quantised: bool,
    with_tokenizer: bool,
    load: Callable[..., LoadedModel],
    tell: Callable[[str], None] | None,
) -> Assembly:
    """The same over several ranks: each is given its share of memory and threads, and loads its part."""
    layout, cores, free_bytes = config.layout, available_cores(), free_memory(config)
    own_ranks = layout.world - config.remote_ranks
    places, unit = max(cores, LEAST_CPU_RANKS), f"places for ranks on {cores} CPU cores"
    own_bytes = free_bytes // own_ranks
    on_gpu = config.device == "cuda"
    gpus, nccl = (torch.cuda.device_count(), has_nccl()) if on_gpu else (0, False)
    ranks = RankPlaces(config.device, own_ranks, config.remote_ranks, gpus, nccl)
    chosen = choose_backend(config.rank_backend, ranks)
    config = replace(config, rank_backend=chosen.backend)
    log.info("ranks exchange numbers by %s", chosen)
    if config.device == "cuda":
        from cumulo.engine.play.rank_player_cuda import gpu_places, own_memory, refuse_layout

        refuse_layout(files.spec, layout)
        if config.redundant_experts:
            raise ConfigError("redundant_experts needs ranks on CPUs: omit it, or choose device=cpu")
        places, unit = gpu_places(config.rank_backend), "GPUs"
        own_bytes = own_memory(files.spec, config, layout, free_bytes)
    problems = list(serving_problems(files.spec, layout, places + config.remote_ranks, unit))
    if config.redundant_experts and files.spec.moe is not None:
        problem = copies_problem(files.spec.moe.experts, layout.ep, config.redundant_experts)
        problems += [problem] if problem else []
    if problems:
        raise ConfigError("; ".join(problems))
    memory = plan_rank_memory(files.spec, weight_bytes, config, layout, own_bytes)
    host = host_and_port(config.rank_address)[0] if config.remote_ranks else THIS_HOST
    store = meeting_point(host=host)
    setup = RankSetup(
        files.path,
        files.spec,
        config,
        memory,
        keep_quantised,
        with_tokenizer,
        max(1, (config.threads or cores) // own_ranks),
        store.port,
        RankTable.create(layout.world),
        os.getpid(),
        host,
        host,
        weights=weights_digest(files.path) if config.remote_ranks else "",
    )

    def guidance_of(loaded: LoadedModel) -> Guidance | None:
        tokenizer = loaded.tokenizer
        return Guidance(tokenizer, files.spec.vocab_size, loaded.eos_ids) if tokenizer is not None else None

    loaded, guidance, player = start_ranks(setup, store, lambda part: load(part=part), guidance_of)
    if config.device == "cuda" and chosen.backend != "symmetric":
        player = replace(player, runs_on=f"{player.runs_on}; ranks exchange numbers by {chosen}")
    engine = _engine(
        player, config, memory, loaded.tokenizer, loaded.eos_ids, files.spec.vocab_size, guidance
    )
    return _complete(files, config, loaded, memory, engine, player, tell)


def _why_no_role(config: EngineConfig) -> str:
    """What of a layout does not go with a role; empty: nothing. Every rank must have a part of every block."""
    layout = config.layout
    if layout.pp > 1 or layout.dp > 1:
        return "run on tensor-parallel ranks only: omit pp and dp"
    return "run on the ranks of one host: omit remote_ranks" if config.remote_ranks else ""


def _complete(
    files: ModelFiles,
    config: EngineConfig,
    loaded: LoadedModel,
    memory: MemoryPlan,
    engine: Engine,
    player: Player,
    tell: Callable[[str], None] | None,
) -> Assembly:
    """Whatever computes: adapters, kernels that are compiled before anybody waits for them, and other engines."""
    if config.max_loras:
        slots, install = engine.scheduler.adapters, player.runner.load_adapter
        engine.adapters = AdapterStore(files.spec, slots, config.max_lora_rank, install, files.path)
    if config.device == "cuda":
        if tell is not None:
            tell("compiling GPU kernels (kept for the next start)")
        compile_kernels(engine)
    # What engines that exchange KV must have in common: other hosts may call other weights by the same name.
    weights = "" if config.role == "both" else f" (weights {weights_digest(files.path)})"
    engine.link = _link(engine, player, config, files.name + weights)
    return Assembly(loaded, config, memory, engine, player)


def _link(
    engine: Engine, player: Player, config: EngineConfig, model: str
) -> TransferSender | TransferReceiver | None:
    """To other engines, as the engine's role asks for."""
    if config.role == "both":
        return None
    runner = player.runner
    ranked = runner if isinstance(runner, RankedRunner) else None
    cache: SentCache | None = getattr(runner, "cache", None) if ranked is None else ranked.caches
    if not isinstance(cache, KVCache | RankCaches):
        raise ConfigError(
            f"role={config.role} needs an engine whose KV cache is in its own process: omit role"
        )
    if config.role == "decode":
        engine.scheduler.transfers.receive(cache.spec.layers, config.transfer_stall_s)
        return TransferReceiver(cache, model, named_addresses(config.prefill_engines), config.transfer_key)
    sender = TransferSender(cache, model, config.transfer_address, config.transfer_key)
    # On one host all layers of a GPU's step go in one copy; over a network each leaves when it is computed.
    if isinstance(runner, TorchRunner) or (ranked is None and sender.staged):
        runner.layer_teller = sender.layer_teller  # type: ignore[attr-defined]
    if ranked is not None:
        sender.before_told = ranked.wait_for_ranks
    return sender


def _mover(engine: Engine, player: Player, config: EngineConfig, files: ModelFiles) -> TierMover:
    fingerprint = kv_fingerprint(files.path, files.spec, config, player.runs_on)
    folder = KvFiles(Path(config.kv_disk), fingerprint, int(config.kv_disk_gib * GIB))
    assert player.runner.pool is not None  # memory was planned with host blocks for it
    return TierMover(folder, player.runner.pool, engine.scheduler)


def compile_kernels(engine: Engine) -> None:
    """One short prompt and two tokens: what is compiled on first use is compiled now, and nobody waits for it.

    The engine is left as it was: with nothing in its cache, its costs unlearnt, and no seed taken.
    """
    scheduler = engine.scheduler
    length = min(40, scheduler.config.max_context - 3)
    if length < 1:
        return
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
    engine.add([0] * length, params, request_id="compiling kernels")
    while engine.has_work:
        for output in engine.step().finished:
            if output.error is not None:
                raise CumuloError(f"the model does not run on this device: {output.error}; try device=cpu")
    scheduler.costs.forget()
    scheduler.pool.clear_cache()


def device_kind(device: str) -> str:
    """ "cpu" or "cuda". A GPU that is too old counts as none; what the user can install is asked for."""
    if device not in ("auto", "cpu", "cuda"):
        raise CumuloError(f"device must be auto, cpu or cuda; got {device!r}")
    if device == "cpu":
        return "cpu"
    obstacle = None
    if not torch.cuda.is_available():
        obstacle = "PyTorch sees no GPU here"
    elif torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        obstacle = f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and 8.0 is needed"
    if obstacle is not None:
        if device == "auto":
            return "cpu"
        raise CumuloError(f"device=cuda was asked for, but {obstacle}; omit device, or use device=cpu")
    if find_spec("triton") is None:
        raise CumuloError(
            "the GPU kernels need Triton, which is not installed: pip install triton, or use device=cpu"
        )
    return "cuda"


def torch_dtype(config: EngineConfig) -> torch.dtype:
    return getattr(torch, config.dtype)  # type: ignore[no-any-return]


def free_memory(config: EngineConfig) -> int:
    """The free memory of the device that holds weights and KV cache."""
    return gpu_memory() if config.device == "cuda" else available_memory()


def held_bytes(files: ModelFiles, dtype: torch.dtype, keep_quantised: bool) -> int:
    """What the weights take when loaded: quantised blocks as they are or expanded, the rest in `dtype`."""
    plain = files.parameters - files.quantised_parameters
    if keep_quantised:
        return files.quantised_bytes + plain * dtype.itemsize
    return files.parameters * dtype.itemsize

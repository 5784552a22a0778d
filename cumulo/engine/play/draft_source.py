"""What drafts besides n-gram lookup: a draft model or an Eagle head, loaded from what `speculate` names. Called
by the assembly, before memory is planned (sizes) and after the engine's runner is made (the drafter).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.plan import Runner
from cumulo.engine.memory.needs import DraftNeeds
from cumulo.engine.play.drafter import Drafter, DraftModel, EagleDraft, WholeDraftModel
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import ConfigError
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.files.load import load_model
from cumulo.models.heads.eagle import EagleHead, StreamTap, eagle_layers
from cumulo.models.heads.files import is_eagle_folder, load_eagle
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.models.play.fused_eagle import FusedEagle, why_not_head
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftSource:
    name: str
    served: ModelSpec
    drafts: Decoder | EagleHead
    tokenizer: Tokenizer | None = None  # of a model

    @property
    def taps(self) -> tuple[int, ...]:
        """Where a head sees the served model's stream."""
        return eagle_layers(self.served.layers) if isinstance(self.drafts, EagleHead) else ()

    def needs(self, element_bytes: int, on_gpu: bool) -> DraftNeeds:
        # A GPU's head sees every token when it is computed; on a CPU what it will see is kept.
        tapped = 0 if on_gpu else len(self.taps) * self.served.hidden
        per_token = self.drafts.spec.kv_bytes_per_token(element_bytes) + tapped * element_bytes
        seen = 0
        if on_gpu:  # CudaDecoder.tapped, and CudaEagle's stream, tokens, norm and projections
            own = self.drafts.spec
            projected = (own.heads + 2 * own.kv_heads) * own.head_dim
            seen = element_bytes * ((len(self.taps) + 3) * self.served.hidden + projected)
        return DraftNeeds(self.name, self.drafts.weight_bytes, per_token, seen)


def load_draft(
    config: EngineConfig, served: ModelSpec, dtype: torch.dtype, keep_quantised: bool
) -> DraftSource | None:
    """None where nothing or n-gram lookup drafts."""
    if config.speculate in ("", "ngram"):
        return None
    path = Path(config.speculate)
    if config.device != "cpu" and not is_eagle_folder(path):
        raise ConfigError(
            f"speculate={config.speculate} runs on the CPU engine so far; on a GPU choose ngram or the folder of "
            "an EAGLE-3 head, or choose device=cpu"
        )
    if is_eagle_folder(path):
        packed = dtype == torch.float32 and config.device == "cpu"
        return DraftSource(path.name, served, load_eagle(path, served, dtype=dtype, pack=packed))
    model = load_model(config.speculate, dtype=dtype, keep_quantised=keep_quantised)
    return DraftSource(model.name, served, model.decoder, model.tokenizer)


def check_tokenizer(source: DraftSource, tokenizer: Tokenizer | None) -> None:
    """A draft model must mean the same by every token."""
    if tokenizer is None or source.tokenizer is None:
        return
    for token in range(min(source.served.vocab_size, source.drafts.spec.vocab_size)):
        here, there = tokenizer.token_bytes(token), source.tokenizer.token_bytes(token)
        if here != there:
            raise ConfigError(
                f"speculate={source.name} cannot draft for this model: token {token} is {there!r} there and "
                f"{here!r} here; choose a draft model with the same tokenizer"
            )


def attach_rounds(source: DraftSource, runner: Runner) -> None:
    """Give a GPU's runner a head, which drafts in rounds."""
    from cumulo.engine.play.cuda.rounds import HeadRounds
    from cumulo.engine.play.runner_cuda import CudaRunner
    from cumulo.models.play.cuda_eagle import CudaEagle

    assert isinstance(runner, CudaRunner) and isinstance(
        source.drafts, EagleHead
    )  # load_draft refuses others
    model, cache, head = runner.model, runner.cache, source.drafts
    head.rotary.serve(runner.table.max_context)
    head = head.to(model.device)
    own = KVCache(head.spec, cache.blocks, cache.block_size, cache.key_storage.dtype, model.device)
    model.tap(source.taps)
    eagle = CudaEagle(head, model, len(runner.slots.contexts))
    runner.launches.head = HeadRounds(eagle, own, model, runner.slots)


def attach_draft(source: DraftSource, runner: Runner, decoder: Decoder) -> None:
    """Give the runner a drafter, whose cache has as many blocks as the runner's."""
    if not isinstance(runner, TorchRunner):
        attach_rounds(source, runner)
        return
    cache, dtype = runner.cache, decoder.dtype
    context = runner.table.max_context
    drafts, limit = source.drafts, context
    spec = replace(drafts.spec, max_context=max(context, drafts.spec.max_context))
    own = KVCache(spec, cache.blocks, cache.block_size, dtype)
    model: DraftModel
    tap: StreamTap | None = None
    if isinstance(drafts, EagleHead):
        drafts.rotary.serve(context)
        slots = cache.blocks * cache.block_size
        tap = StreamTap(source.taps, slots, source.served.hidden, dtype, runner.device)
        assert isinstance(runner.model, (Decoder, FusedDecoder))
        runner.model.tap = tap
        if why_not_head(drafts, decoder.embed) is None:
            model = FusedEagle(drafts, decoder.embed, tap)
        else:
            model = EagleDraft(drafts, decoder.embed.rows, tap.stream_at)
    else:
        limit = min(context, drafts.spec.max_context)
        drafts.rotary.serve(limit)
        plays = drafts if why_not(drafts) else FusedDecoder(drafts)
        model = WholeDraftModel(plays, source.served.vocab_size, drafts.spec.vocab_size)
    runner.drafter = Drafter(model, own, len(runner.table.lengths), limit, tap)

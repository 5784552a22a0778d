"""How much quality a quantised model keeps, next to its speed and memory: perplexity, KL and top-1 agreement
against the model in 16 bits. `cumulo bench quality` prints it.

All variants read the same held-out text: the half of the Python language reference that no default calibration
text is taken from. Speeds are measured in turns with the 16-bit model, so that other programs slow down both.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cumulo.base.reference_text import reference_text
from cumulo.base.report import Row
from cumulo.bench.turns import Tell, median_ratio, take_turns
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.errors import ConfigError
from cumulo.models.files.hub import resolve
from cumulo.models.files.load import inspect_model
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.quant.decide.recipe import METHODS, Method, Recipe, settled
from cumulo.quant.play.layer import BLOCK_SIZE, text_batch
from cumulo.quant.play.run import Calibration, quantise

DECODED = 32  # tokens per measurement of speed
LOGIT_ROWS = 16  # at a time, as in a step of sixteen sequences; also bounds memory at large vocabularies


@dataclass(frozen=True, slots=True)
class QualityConfig:
    methods: tuple[str, ...]
    folders: tuple[Path, ...] = ()  # quantised before, by whatever tool
    bits: int = 4
    group: int | None = None
    calibration: Calibration = Calibration()
    text: Path | None = None  # held-out text; None: the default
    sequences: int = 16
    length: int = 256
    rounds: int = 3
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One variant's. KL and agreement are against the 16-bit model, speeds relative to it."""

    name: str
    weight_bytes: int
    perplexity: float
    kl: float
    agreement: float
    decode_tok_s: float
    relative_speed: float


def measure(model: str | None, config: QualityConfig, tell: Tell) -> list[Figures]:
    """The 16-bit model first, then the file that it was read from if that is quantised, every method and folder."""
    source, context = resolve(model), max(64, config.length)
    known = (*([source.path] if source.format == "gguf" else []), *config.folders)
    text = _checked_text(model, config, known)
    steps = 1 + 2 * len(config.methods) + len(known)
    engine = EngineConfig(
        threads=config.threads,
        kv_blocks=-(-context // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_context=context,
    )
    with tempfile.TemporaryDirectory(prefix="cumulo-quality-") as work:
        tell("the 16-bit model reads the text", 0, steps)
        with LLM(model, config=engine, keep_quantised=False) as exact, torch.inference_mode():
            tokens = held_out_tokens(exact.tokenizer, text, config.sequences, config.length)
            reference = hidden_states(exact, tokens)

            def compared(name: str, own: LLM) -> Figures:
                states = reference if own is exact else hidden_states(own, tokens)
                sides = {
                    name: lambda _, llm=llm: _decode_tok_s(llm) for name, llm in (("own", own), ("16", exact))
                }
                speeds = take_turns(sides, config.rounds, lambda _: None, warm_ups=0)
                return Figures(
                    name, int(own.ledger["weights"].measured or 0),
                    *likeness(exact, reference, own, states, tokens),
                    statistics.median(speeds["own"]), median_ratio(speeds["own"], speeds["16"]),
                )  # fmt: skip

            found, done = [compared("16-bit", exact)], 1
            variants = [(method, Path(work) / method) for method in config.methods]
            for method, folder in [*variants, *((None, given) for given in known)]:
                name = "as in its file" if folder == source.path else folder.name
                if method is not None:

                    def show(stage: str, *_: int, method: str = method, done: int = done) -> None:
                        tell(f"{method}: {stage}", done, steps)

                    recipe = Recipe(cast(Method, method), bits=config.bits, group=config.group)
                    calibration = config.calibration if recipe.needs_calibration else Calibration()
                    with torch.inference_mode(False):
                        name = quantise(model, folder, recipe, calibration, show).recipe.in_words
                    done += 1
                tell(f"{name}: reading the text", done, steps)
                with LLM(str(folder), config=engine) as own:
                    found.append(compared(name, own))
                done += 1
    return found


def _checked_text(model: str | None, config: QualityConfig, known: Sequence[Path]) -> str:
    """The held-out text. What would fail after minutes of quantising is refused here."""
    if not config.methods and not known:
        raise ConfigError(
            f"name a method or a folder to compare: --methods {','.join(METHODS)}, or --folder DIR"
        )
    spec = inspect_model(model).spec
    if config.length > spec.max_context:
        raise ConfigError(
            f"--length {config.length:,} is more than the model's context of {spec.max_context:,} tokens"
        )
    for method in config.methods:
        settled(Recipe(cast(Method, method), bits=config.bits, group=config.group), spec)
    for folder in config.folders:
        inspect_model(folder)
    if config.text is None:
        return reference_text("held-out")
    try:
        return config.text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--text {config.text} cannot be read: {why}") from error


def held_out_tokens(tokenizer: Tokenizer, text: str, sequences: int, length: int) -> Tensor:
    tokens = tokenizer.encode(text, parse_special_tokens=False)
    if len(tokens) < sequences * length:
        raise ConfigError(
            f"the text has {len(tokens):,} tokens; {sequences} sequences of {length} need {sequences * length:,}"
        )
    step = len(tokens) // sequences
    return torch.tensor([tokens[step * index : step * index + length] for index in range(sequences)])


def _decode_tok_s(llm: LLM) -> float:
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([[1] * 8], params)
    return DECODED / (time.perf_counter() - began)


def growth_rows(found: Sequence[Figures]) -> list[Row]:
    """What the papers claim is a bound: a calibrated method beats rounding to nearest."""
    plain, *others = found
    result = []
    nearest = next((one for one in others if one.name.startswith("rtn")), None)
    for one in others:
        if nearest is not None and one.name.startswith(("awq", "gptq")):
            ratio = (one.perplexity - plain.perplexity) / (nearest.perplexity - plain.perplexity)
            result.append(
                Row(f"{one.name.split(',')[0]}: growth of perplexity / rtn's", ratio, "", "lower", must=1.0)
            )
    return result


def chart(found: Sequence[Figures]) -> Any:
    """KL over the size of the weights, one dot per variant."""
    from cumulo.base.chart import Chart, Series

    return Chart(
        "Quality and size of quantised models",
        "weights in memory (MiB)",
        "mean KL to 16 bits (nats)",
        [
            Series(one.name, [(one.weight_bytes / 2**20, one.kl)], "dots", color)
            for color, one in enumerate(found)
        ],
    )


def engine_model(llm: LLM) -> Any:
    """The decoder that the engine's runner plays plans on."""
    return cast(TorchRunner, llm.engine.runner).model


def hidden_states(llm: LLM, sequences: Tensor) -> Tensor:
    """Final hidden states of every position [sequences, tokens, hidden]; a sequence is a step, as a prompt is."""
    decoder, cache = engine_model(llm), cast(TorchRunner, llm.engine.runner).cache
    return torch.stack([decoder.forward(text_batch(tokens), cache) for tokens in sequences])


def likeness(
    exact: LLM, reference: Tensor, own: LLM, states: Tensor, tokens: Tensor
) -> tuple[float, float, float]:
    """Perplexity; and against the exact decoder mean KL in nats and the share of equal likeliest tokens. From the
    hidden states of both, of every position but the last, whose next token is not known."""
    divergence, agreed, surprise, count = 0.0, 0, 0.0, 0
    for wanted_states, own_states, ids in zip(reference, states, tokens, strict=True):
        for start in range(0, len(ids) - 1, LOGIT_ROWS):
            rows = slice(start, min(start + LOGIT_ROWS, len(ids) - 1))
            wanted = given = engine_model(exact).logits(wanted_states[rows]).double().log_softmax(-1)
            if own is not exact:
                given = engine_model(own).logits(own_states[rows]).double().log_softmax(-1)
            following = ids[rows.start + 1 : rows.stop + 1]
            divergence += float((wanted.exp() * (wanted - given)).sum())
            agreed += int((wanted.argmax(-1) == given.argmax(-1)).sum())
            surprise -= float(given.gather(1, following[:, None]).sum())
            count += len(following)
    return math.exp(surprise / count), divergence / count, agreed / count

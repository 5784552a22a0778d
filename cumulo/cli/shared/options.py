"""Options that several verbs share, each declared once."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from cumulo.base.nearest import did_you_mean
from cumulo.cli.shared.declare import flag, option
from cumulo.errors import CumuloError

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig

MODEL_HELP = (
    "A folder, a GGUF file or a Hugging Face model name. Default: the built-in SmolLM2-135M-Instruct."
)

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the report to this file as JSON; '-': stdout."),
]
HubOption = Annotated[
    str, typer.Option("--hub", metavar="URL", help="Address of the hub that models are pulled from.")
]
LoraOption = Annotated[
    Path | None,
    typer.Option(
        "--lora",
        metavar="DIR",
        help="Answer with the low-rank adapter in this folder, as PEFT or `cumulo train` writes it.",
        show_default=False,
    ),
]
Threads = Annotated[int | None, typer.Option(help="Number of CPU threads. Default: torch's default.")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine runs a model; None means the engine's own default."""

    PANEL: ClassVar[str] = "Engine"

    threads: Threads = None
    max_context: int | None = option(
        "Maximum length of prompt and answer together, in tokens. Default: the model's maximum.", None
    )
    kv_memory_gib: float | None = option(
        "Memory for the KV cache, in GiB. Default: chosen from the free memory.", None
    )
    device: str | None = option("cpu or cuda. Default: cuda if a GPU is present.", None)
    dtype: str | None = option(
        "Number format of activations and KV cache: float32 or float64 on a CPU, bfloat16 or float16 on a GPU. "
        "Default: float32 on a CPU, bfloat16 on a GPU.",
        None,
    )
    weights: str | None = option(
        "fp8 or int4: quantize the layers' weights to 8 or 4 bits, except routed experts (GPU only).", None
    )
    kv_dtype: str | None = option("fp8, or int8 on a CPU: store the KV cache in 8 bits.", None)
    batch_invariant: bool | None = option(
        "Give a request the same bits whatever else is in the batch, and on 1, 2 and 4 ranks of --tp; slower (GPU "
        "only).",
        None,
        "--batch-invariant",
    )
    invariant_tp: int | None = option(
        "With --batch-invariant: give the bits that 1 rank, this many ranks, and powers of two in between have in "
        "common. Default: 4, or the number of ranks if larger.",
        None,
    )
    speculate: str | None = option(
        "Draft tokens and verify several in one step; answers stay the same. ngram: draft from repeated text; "
        "MODEL: with a draft model of the same tokenizer; DIR: with an EAGLE-3 head.",
        None,
        metavar="ngram|MODEL|DIR",
    )

    tp: int | None = option(
        "Tensor parallel: cut heads, feed-forward width and vocabulary over this many processes.", None
    )
    pp: int | None = option(
        "Pipeline parallel: divide the layers over this many processes (times --tp and --dp).", None
    )
    dp: int | None = option(
        "Data-parallel attention: each sequence's KV cache is in one of this many processes.", None
    )
    ep: int | None = option(
        "Expert parallel: spread whole experts over the tp x dp processes; alone it also sets --tp.", None
    )
    redundant_experts: int | None = option(
        "With --ep: number of copies of the experts that get most tokens, placed by measured load.", None
    )
    rank_backend: str | None = option(
        "How processes exchange numbers in a step: symmetric (GPUs of one host), nccl (GPUs of several hosts) or "
        "gloo (CPUs; slow between GPUs). Default: chosen by where they are.",
        None,
        metavar="symmetric|nccl|gloo",
    )
    collective: str | None = option(
        "Algorithm of all-reduces between CPU ranks, such as all_reduce=ring, or auto. Default: gloo's.",
        None,
        metavar="NAME=ALGORITHM",
    )
    collective_profile: str | None = option(
        "Choose the algorithm by what `cumulo bench collectives --profile FILE` measured.",
        None,
        metavar="FILE",
    )

    def config(self, **more: Any) -> "EngineConfig":
        return engine_config(**asdict(self), **more)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How much is computed together; 0 means the engine's own default."""

    PANEL: ClassVar[str] = "Steps of the engine"

    max_running: int = option("Maximum number of running sequences; 0: the engine's default.", 0, min=0)
    max_tokens_per_step: int = option(
        "Maximum number of tokens in a step, of prompts and answers together; 0: the engine's default.",
        0,
        min=0,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers are drawn: the names are those of SamplingParams."""

    PANEL: ClassVar[str] = "Sampling"

    temperature: float | None = option("Sampling temperature, 0 to 2; 0: always the most likely token.", None)
    top_k: int | None = option("Sample from the k most likely tokens; 0: from all.", None)
    top_p: float | None = option("Sample from the smallest set of tokens whose probabilities sum to p.", None)
    min_p: float | None = option("Drop tokens less likely than this fraction of the most likely one.", None)
    repetition_penalty: float | None = option(
        "Values above 1 make tokens that have already appeared less likely.", None
    )
    presence_penalty: float = option("Subtracted from the logit of every token that has appeared.", 0.0)
    frequency_penalty: float = option("Subtracted from a token's logit for each time it has appeared.", 0.0)
    max_tokens: int = option("Maximum number of tokens in the answer.", 128)
    min_tokens: int = option("Minimum number of tokens in the answer.", 0)
    ignore_eos: bool = flag("Continue after the end-of-sequence token.")
    seed: int | None = option("Random seed. The same seed gives the same answer.", None)
    stop: list[str] | None = option("Stop the answer at this text. Can be given more than once.", None)
    n: int = option("Number of answers per prompt.", 1, "--n", "-n")
    best_of: int | None = option("Draw this many answers and keep the n most likely.", None)
    beam_width: int | None = option("Beam search with this many beams.", None)
    logprobs: int | None = option("Return log-probabilities with this many alternatives per token.", None)

    def given(self) -> dict[str, Any]:
        """The options that have a value, as SamplingParams takes them; the others are the model's."""
        chosen = asdict(self) | {"stop": tuple(self.stop or ())}
        return {name: value for name, value in chosen.items() if value is not None}


def engine_config(**chosen: Any) -> "EngineConfig":
    """An EngineConfig of the given options; None means the engine's own default."""
    from cumulo.engine.config import EngineConfig

    _check_drafter(chosen.get("speculate"))
    return EngineConfig(**{key: value for key, value in chosen.items() if value is not None})


def _check_drafter(name: str | None) -> None:
    """A word that is neither a drafter nor a path nor a Hugging Face name is refused before a model is loaded."""
    if name in (None, "ngram") or "/" in name or Path(name).expanduser().exists():
        return
    raise CumuloError(
        f"--speculate must be ngram, a draft model or a folder with an EAGLE-3 head; there is nothing at "
        f"{name!r}{did_you_mean(name, ['ngram'], otherwise='')}"
    )


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    PANEL: ClassVar[str] = "KV cache in host memory and on disk"

    kv_host_gib: float = option(
        "Host memory for blocks that leave the KV cache, in GiB: prefixes and preempted sequences are fetched from "
        "there instead of computed again.",
        0.0,
    )
    kv_disk: str = option(
        "Folder and size in GiB for prefixes that leave host memory, for example /var/cache/kv:100. They survive a "
        "restart, and the replicas of a host share them.",
        "",
        metavar="PATH:GIB",
    )

    def config(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        if not 0 <= self.kv_host_gib < float("inf"):
            raise CumuloError(f"--kv-host-gib must be a size in GiB, 0 or more; got {self.kv_host_gib:g}")
        folder, gib = "", 0.0
        if self.kv_disk:
            folder, _, size = self.kv_disk.rpartition(":")
            try:
                gib = float(size.lower().removesuffix("gib"))
            except ValueError:
                gib = 0.0
            if not folder or not 0 < gib < float("inf"):
                raise CumuloError(
                    f"--kv-disk must be a folder and a size in GiB, such as /var/cache/kv:100; got {self.kv_disk!r}"
                )
            _check_disk(folder, gib)
        return {"kv_host_gib": self.kv_host_gib, "kv_disk": folder, "kv_disk_gib": gib}


def _check_disk(folder: str, gib: float) -> None:
    """Refuse more than the whole disk: what is free on it may change, its size does not."""
    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    whole = shutil.disk_usage(place).total / (1 << 30)
    if gib > whole:
        raise CumuloError(f"--kv-disk {folder}:{gib:g} is more than its disk has, {whole:.0f} GiB in all")

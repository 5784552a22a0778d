"""Options several verbs share, each declared once. `engine_config` and `sampling` turn them into objects."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.decide.params import SamplingParams

MODEL_HELP = (
    "A folder, a GGUF file or a Hugging Face model name. Default: the built-in SmolLM2-135M-Instruct."
)

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the report to this file as JSON; '-': stdout."),
]
Threads = Annotated[int | None, typer.Option(help="Number of CPU threads. Default: torch's default.")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Maximum length of prompt and answer together, in tokens. Default: the model's maximum."
    ),
]
KvMemory = Annotated[
    float | None,
    typer.Option(
        "--kv-memory-gib", help="Memory for the KV cache, in GiB. Default: chosen from the free memory."
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if a GPU is present.")]
Weights = Annotated[
    str | None,
    typer.Option(help="fp8: quantize the layers' weights to 8 bits, except routed experts (GPU only)."),
]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="fp8: store the KV cache in 8 bits (GPU only).")
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0: always the most likely token.")
]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")]
TopP = Annotated[
    float, typer.Option(help="Sample from the smallest set of tokens whose probabilities sum to p.")
]
MinP = Annotated[
    float, typer.Option(help="Drop tokens less likely than this fraction of the most likely one.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Values above 1 make tokens that have already appeared less likely.")
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens in the answer.")]
Seed = Annotated[int | None, typer.Option(help="Random seed. The same seed gives the same answer.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop the answer at this text. Can be given more than once.")
]


def engine_config(**chosen: Any) -> "EngineConfig":
    """An EngineConfig of the given options; None means the engine's own default."""
    from cumulo.engine.config import EngineConfig
    from cumulo.errors import CumuloError

    threads, max_context, kv_gib = (chosen.get(key) for key in ("threads", "max_context", "kv_memory_gib"))
    if threads is not None and threads < 1:
        raise CumuloError(f"--threads must be 1 or more, got {threads}")
    if max_context is not None and max_context < 1:
        raise CumuloError(f"--max-context must be 1 or more tokens, got {max_context}")
    if kv_gib is not None and not kv_gib > 0:
        raise CumuloError(f"--kv-memory-gib must be more than 0, got {kv_gib}")
    for name in ("weights", "kv_dtype"):
        if chosen.get(name) not in (None, "auto", "fp8"):
            raise CumuloError(f"--{name.replace('_', '-')} must be auto or fp8, got {chosen[name]!r}")
    if chosen.get("device") not in (None, "auto", "cpu", "cuda"):
        raise CumuloError(f"--device must be cpu or cuda, got {chosen['device']!r}")
    return EngineConfig(**{key: value for key, value in chosen.items() if value is not None})


def sampling(chosen: Mapping[str, Any]) -> "SamplingParams":
    """SamplingParams of the given fields, which validate themselves."""
    from cumulo.engine.decide.params import SamplingParams

    fields = dict(chosen)
    fields["stop"] = tuple(fields.get("stop") or ())
    return SamplingParams(**fields)

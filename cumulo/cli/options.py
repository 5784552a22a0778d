"""Options several verbs share, each declared once. `engine_config` and `sampling` turn them into objects."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.params import SamplingParams

MODEL_HELP = "A folder, a GGUF file, a Hugging Face name; left out: the built-in SmolLM2-135M-Instruct."

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the report there ('-': stdout).")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; left out: torch's default.")]
MaxContext = Annotated[
    int | None, typer.Option(help="Longest prompt + answer in tokens; left out: what the model allows.")
]
KvMemory = Annotated[
    float | None, typer.Option("--kv-memory-gib", help="Memory for the KV cache; left out: chosen for you.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; left out: a GPU if there is one.")]
Weights = Annotated[
    str | None,
    typer.Option(help="fp8: quantise the layers' matrices to 8 bits, routed experts excepted (GPU)."),
]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="fp8: keys and values take one byte a number (GPU).")
]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens whose probability reaches p.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens already seen.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer in tokens.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")]


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
            raise CumuloError(f"--{name.replace('_', '-')} is auto or fp8, not {chosen[name]!r}")
    if chosen.get("device") not in (None, "auto", "cpu", "cuda"):
        raise CumuloError(f"--device is cpu or cuda, not {chosen['device']!r}")
    return EngineConfig(**{key: value for key, value in chosen.items() if value is not None})


def sampling(chosen: Mapping[str, Any]) -> "SamplingParams":
    """SamplingParams of the given fields, which validate themselves."""
    from cumulo.engine.params import SamplingParams

    fields = dict(chosen)
    fields["stop"] = tuple(fields.get("stop") or ())
    return SamplingParams(**fields)

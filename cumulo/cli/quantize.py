"""`cumulo quantize`: a model with fewer bits per weight, as a folder that Cumulo and other engines serve."""

from dataclasses import dataclass, fields
from pathlib import Path

from cumulo.base.quantities import quantity
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import REQUIRED, flag, option, takes_options, typed_flags
from cumulo.cli.shared.terminal import loading, note, out
from cumulo.errors import require_least

EXAMPLE = "Example: [bold]cumulo quantize --method rtn --bits 4 --out smollm2-w4[/bold]"


_WHOLE_NUMBERS = ("rtn", "gptq", "awq")
_METHODS_OF = {  # options that say nothing to other methods
    "bits": _WHOLE_NUMBERS, "group": _WHOLE_NUMBERS, "symmetric": _WHOLE_NUMBERS, "act_order": ("gptq",),
    "damping": ("gptq",), "scheme": ("fp8",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    model: options.ModelArgument = None
    output: Path = option(
        "Folder to write. It must not exist or be empty.", REQUIRED, "--out", "--output", "-o", metavar="DIR"
    )
    method: str = option(
        "gptq, awq or rtn (2, 4 or 8 bits, 16-bit activations); int8 (8-bit weights and activations); fp8.",
        "gptq",
    )
    bits: int = option("Bits per weight for gptq, awq and rtn.", 4)
    group: int | None = option(
        "Columns that share a scale. Default: the largest of 128, 64 and 32 that divides every row.", None
    )
    calibration: Path | None = option(
        "Text file, or .jsonl file with `text` or `messages`, that awq and gptq are calibrated with. "
        "Default: part of the Python language reference.",
        None,
    )
    sequences: int = option("Number of calibration sequences.", 64)
    length: int = option("Tokens per calibration sequence.", 512)
    format: str | None = option(
        "compressed-tensors, awq, gptq, or fp8 (DeepSeek's). Default: compressed-tensors.", None
    )
    symmetric: bool | None = option(
        "Whether zero is the middle of the range. Default: symmetric, except for awq.",
        None,
        "--symmetric/--asymmetric",
    )
    act_order: bool = option(
        "gptq: round the columns with the largest inputs first.", True, "--act-order/--no-act-order"
    )
    damping: float = option("gptq: share of the Hessian's mean diagonal that is added to it.", 0.01)
    scheme: str = option("fp8: what shares a scale: channel, tensor or block (128 x 128).", "channel")
    static_activations: bool = flag(
        "fp8: measure one scale for the activations of each matrix on the calibration text."
    )
    layers: int | None = option(
        "Quantize only this many layers from the first, to try a method quickly. Default: all.", None
    )
    threads: options.Threads = None


@takes_options
def quantize(chosen: QuantizeOptions) -> None:
    """Quantize a model and write a Hugging Face folder.

    It works layer by layer, so it needs the memory of about one layer and of the calibration text. If it is
    interrupted, run the same command again: it continues after the last finished layer.
    """
    require_least(chosen, 1, "sequences", "length", of="--")
    for name, written in typed_flags().items():
        if chosen.method not in _METHODS_OF.get(name, (chosen.method,)):
            note(f"{written} is ignored: it is for {', '.join(_METHODS_OF[name])}, not for {chosen.method}")
    with loading(lines=True) as show:
        import torch

        from cumulo.quant.decide.recipe import Recipe
        from cumulo.quant.play.run import Calibration, quantise

        if chosen.threads is not None:
            options.engine_config(threads=chosen.threads)  # refuses 0
            torch.set_num_threads(chosen.threads)
        recipe = Recipe(**{each.name: getattr(chosen, each.name) for each in fields(Recipe)})
        calibration = Calibration(chosen.calibration, chosen.sequences, chosen.length)
        made = quantise(chosen.model, chosen.output, recipe, calibration, show)
    if made.resumed_at:
        note(f"resumed after layer {made.resumed_at}")
    size, plain = (quantity(count, "B") for count in (made.weight_bytes, made.source_bytes))
    out.print(f"{made.folder}: {made.recipe.in_words}", soft_wrap=True)
    out.print(f"{size}, in 16 bits {plain}")

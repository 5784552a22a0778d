"""`cumulo generate`: complete one prompt or a file of them, all in one batch."""

from dataclasses import dataclass
from pathlib import Path

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import argument, option, takes_options

EXAMPLE = (
    'Example: [bold]cumulo generate "The capital of France is" --temperature 0 --max-tokens 16 --why[/bold]'
)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    prompt: str | None = argument(
        "The prompt; '-': read one prompt or JSON object per line from stdin.", None
    )
    model: options.ModelOption = None
    lora: options.LoraOption = None
    file: Path | None = option(
        'A file with one prompt per line, or JSON Lines: {"prompt": "..."} or {"messages": [...]}, optionally with '
        "sampling options.",
        None,
        "--file",
        "-f",
    )
    chat: bool = option("Apply the model's chat template to each prompt.", False, "--chat")
    sampling: options.SamplingOptions = options.SamplingOptions()
    why: bool = option(
        "Print the story of each request: queueing, cache hits, chunks, timing.", False, "--why"
    )
    json_file: options.JsonOption = None
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def generate(chosen: GenerateOptions) -> None:
    """Complete one or more prompts. Several prompts run together in one batch."""
    from cumulo.cli.talk import completion

    jobs = completion.read_jobs(chosen.prompt, chosen.file, chosen.sampling.given(), chosen.chat)
    outputs, elapsed_s = completion.run(chosen.model, chosen.engine.config(), jobs, chosen.lora)
    completion.report(jobs, outputs, elapsed_s, chosen.why, chosen.json_file)
    if any(output.error for output in outputs):
        raise typer.Exit(1)

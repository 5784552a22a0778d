"""`cumulo generate`: complete one prompt or a file of them, all in one batch."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = (
    'Example: [bold]cumulo generate "The capital of France is" --temperature 0 --max-tokens 16 --why[/bold]'
)


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; '-': read one prompt or JSON object per line from stdin."),
    ] = None,
    model: options.ModelOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='A file with one prompt per line, or JSON Lines: {"prompt": "..."} or {"messages": [...]}, '
            "optionally with sampling options.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template to each prompt.")
    ] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logit of every token that has appeared.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted from a token's logit for each time it has appeared.")
    ] = 0.0,
    max_tokens: options.MaxTokens = 128,
    min_tokens: Annotated[int, typer.Option(help="Minimum number of tokens in the answer.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")
    ] = False,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of answers per prompt.")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Draw this many answers and keep the n most likely.")
    ] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beam search with this many beams.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Return log-probabilities with this many alternatives per token.")
    ] = None,
    why: Annotated[
        bool,
        typer.Option("--why", help="Print the story of each request: queueing, cache hits, chunks, timing."),
    ] = False,
    json_file: options.JsonOption = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory_gib: options.KvMemory = None,
    device: options.Device = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
) -> None:
    """Complete one or more prompts. Several prompts run together in one batch."""
    from cumulo.cli.talk import completion

    sampling = {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "stop": stop,
        "n": n,
        "best_of": best_of,
        "beam_width": beam_width,
        "logprobs": logprobs,
    }
    config = options.engine_config(
        threads=threads,
        max_context=max_context,
        kv_memory_gib=kv_memory_gib,
        device=device,
        weights=weights,
        kv_dtype=kv_dtype,
    )
    jobs = completion.read_jobs(prompt, file, sampling, chat)
    outputs, elapsed_s = completion.run(model, config, jobs)
    completion.report(jobs, outputs, elapsed_s, why, json_file)
    if any(output.error for output in outputs):
        raise typer.Exit(1)

"""`cumulo chat`: a streaming conversation in the terminal, or one question from a pipe."""

import sys
from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = 'Example: [bold]echo "What is the capital of France?" | cumulo chat[/bold]'


def chat(
    model: options.ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.9,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    max_tokens: options.MaxTokens = 512,
    seed: options.Seed = None,
    stop: options.Stop = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory_gib: options.KvMemory = None,
    device: options.Device = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
) -> None:
    """Chat with a model. In a pipe, it reads the question from stdin and prints only the answer.

    In a terminal, the default temperature is 0.2, and /help lists the commands. In a pipe, the default temperature
    is 0, so that the same question gets the same answer.
    """
    from cumulo.cli.talk import conversation

    interactive = sys.stdin.isatty()
    if temperature is None:
        temperature = 0.2 if interactive else 0.0
    params = options.sampling(
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop": stop,
        }
    )
    config = options.engine_config(
        threads=threads,
        max_context=max_context,
        kv_memory_gib=kv_memory_gib,
        device=device,
        weights=weights,
        kv_dtype=kv_dtype,
    )
    if interactive:
        conversation.talk(model, config, params, system)
    else:
        conversation.answer_stdin(model, config, params, system)

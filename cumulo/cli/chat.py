"""`cumulo chat`: a streaming conversation in the terminal, or one question from a pipe."""

import sys
from dataclasses import dataclass

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import group, option, takes_options

EXAMPLE = 'Example: [bold]echo "What is the capital of France?" | cumulo chat[/bold]'


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    model: options.ModelArgument = None
    lora: options.LoraOption = None
    system: str | None = option("System message.", None)
    sampling: options.SamplingOptions = group(
        options.SamplingOptions(top_k=None, top_p=None, min_p=None, repetition_penalty=None, max_tokens=512),
        without=(
            "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "n", "best_of", "beam_width",
            "logprobs",
        ),
    )  # fmt: skip
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def chat(chosen: ChatOptions) -> None:
    """Chat with a model. In a pipe, it reads the question from stdin and prints only the answer.

    In a terminal, /help lists the commands. Sampling options that you do not give have the values that the authors
    of the model recommend, as in the API. In a pipe, the default temperature is 0, so that the same question gets
    the same answer.
    """
    from cumulo.cli.talk import conversation
    from cumulo.engine.decide.params import SamplingParams

    interactive = sys.stdin.isatty()
    sampling = chosen.sampling.given()
    if not interactive:
        sampling.setdefault("temperature", 0.0)
    SamplingParams(**sampling)  # a wrong one is told before the model is loaded
    begin = conversation.talk if interactive else conversation.answer_stdin
    begin(chosen.model, chosen.engine.config(), sampling, chosen.system, chosen.lora)

"""`cumulo generate`: complete one prompt or a file of them, all in one batch."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cumulo.base.report import Row, write_json
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import argument, flag, option, takes_options
from cumulo.cli.shared.terminal import (
    err,
    load_llm,
    loading,
    marked,
    note,
    only_json,
    out,
    print_error,
    read_stdin,
    read_text,
)
from cumulo.errors import InvalidRequest

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.decide.prompt_lines import Job
    from cumulo.engine.outputs import Progress, RequestOutput

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
    chat: bool = flag("Apply the model's chat template to each prompt.")
    sampling: options.SamplingOptions = options.SamplingOptions()
    why: bool = flag("Print the story of each request: queueing, cache hits, chunks, timing.")
    json_file: options.JsonOption = None
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def generate(chosen: GenerateOptions) -> None:
    """Complete one or more prompts. Several prompts run together in one batch.

    Sampling options that you do not give have the values that the authors of the model recommend.
    """
    jobs = read_jobs(chosen.prompt, chosen.file, chosen.sampling.given(), chosen.chat)
    outputs, elapsed_s = run_jobs(chosen.model, chosen.engine.config(), jobs, chosen.lora)
    show_outputs(jobs, outputs, elapsed_s, chosen.why, chosen.json_file)
    if any(output.error for output in outputs):
        raise typer.Exit(1)


def read_jobs(prompt: str | None, file: Path | None, sampling: Mapping[str, Any], chat: bool) -> list["Job"]:
    """The jobs named by the argument, stdin or --file; exactly one of the three."""
    from cumulo.engine.decide.params import SamplingParams
    from cumulo.engine.decide.prompt_lines import Job, parse_lines

    if (prompt is None) == (file is None):
        raise InvalidRequest(
            "give a prompt, '-' for standard input, or --file: "
            + ("none was given" if prompt is None else "two were given")
        )
    if file is not None:
        jobs = parse_lines(read_text(file), str(file), sampling)
    elif prompt == "-":
        jobs = parse_lines(read_stdin(), "standard input", sampling)
    else:
        assert prompt is not None
        SamplingParams(**sampling)
        jobs = [Job(prompt, sampling)]
    if chat:
        jobs = [dataclasses.replace(job, prompt=job.messages) for job in jobs]
    if len({job.is_chat for job in jobs}) > 1:
        raise InvalidRequest("some lines have a prompt and some have messages; use one kind, or add --chat")
    return jobs


def run_jobs(
    model: str | None, config: "EngineConfig", jobs: list["Job"], lora: Path | None = None
) -> tuple[list["RequestOutput"], float]:
    """All jobs in one batch, with a progress bar; returns outputs in order and the seconds they took. `lora`: the
    folder of the adapter they use."""
    with load_llm(model, config, lora) as llm, loading() as show:
        began_s = time.perf_counter()

        def on_progress(progress: "Progress") -> None:
            told = f"{progress.finished} of {progress.total}, {progress.output_tok_s:.1f} tok/s"
            show(told, progress.finished, progress.total)

        params = [llm.sampling(**job.sampling) for job in jobs]
        if not jobs[0].is_chat and llm.tokenizer.chat_template is not None:
            note(
                f"{llm.model_name} is made to answer messages, and continues your text here; --chat asks it instead"
            )
        if jobs[0].is_chat:
            outputs = llm.chat([job.messages for job in jobs], params, on_progress=on_progress)
        else:
            outputs = llm.generate([job.shown for job in jobs], params, on_progress=on_progress)
        return outputs, time.perf_counter() - began_s


def show_outputs(
    jobs: list["Job"], outputs: list["RequestOutput"], elapsed_s: float, why: bool, json_file: Path | None
) -> None:
    """Texts on stdout, errors and the speed on stderr, stories where asked, and the JSON show_outputs."""
    to_stdout = json_file is None or not only_json(json_file)
    alone = len(outputs) == 1 and len(outputs[0].samples) == 1
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True), 1):
        if output.error:
            print_error(InvalidRequest(f"prompt {number}: {output.error}"))
        for sample in output.samples if to_stdout else ():
            if not alone:
                mark = f"{job.name or number}" + (f".{sample.index + 1}" if len(output.samples) > 1 else "")
                out.print(f"{mark} ", style="bold cyan", end="")
                out.print(" ".join(job.shown.split()), style="dim", soft_wrap=True)
            out.print(sample.text, soft_wrap=True)
        if why:
            err.print(marked("[bold]why[/bold] [dim]{}[/dim]", output.request_id))
            err.print(output.story.describe(), soft_wrap=True, style="dim")
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.samples)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    note(f"{prompts} prompt tokens, {tokens} new tokens in {elapsed_s:.2f} s: {tokens / elapsed_s:.1f} tok/s")
    rows = [
        Row("output tokens per second", tokens / elapsed_s, "tok/s"),
        Row("output tokens", tokens, "tokens"),
        Row("prompt tokens", prompts, "tokens"),
        Row("time", elapsed_s, "s", better="lower"),
    ]
    told = [
        {"id": job.name or output.request_id} | output.to_dict() | {"prompt": job.prompt}
        for job, output in zip(jobs, outputs, strict=True)
    ]
    write_json(json_file, rows, outputs=told)

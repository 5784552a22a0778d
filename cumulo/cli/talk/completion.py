"""The work behind `cumulo generate`: read prompts, run them as one batch, print texts and stories."""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulo.base.report import Row, write_json
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import err, load_llm, note, out, print_error, read_stdin, read_text
from cumulo.engine.decide.params import SamplingParams
from cumulo.errors import InvalidRequest

if TYPE_CHECKING:
    from cumulo.engine.config import EngineConfig
    from cumulo.engine.outputs import Progress, RequestOutput


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete: plain text, or messages for the model's chat template."""

    prompt: str | list[dict[str, str]]
    params: SamplingParams
    name: str | None = None  # the "id" of its JSON line

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def shown(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.prompt if isinstance(self.prompt, list) else [{"role": "user", "content": self.prompt}]


def read_jobs(prompt: str | None, file: Path | None, sampling: Mapping[str, Any], chat: bool) -> list[Job]:
    """The jobs named by the argument, stdin or --file; exactly one of the three."""
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
        jobs = [Job(prompt, options.sampling(sampling))]
    if chat:
        jobs = [dataclasses.replace(job, prompt=job.messages) for job in jobs]
    if len({job.is_chat for job in jobs}) > 1:
        raise InvalidRequest("some lines have a prompt and some have messages; use one kind, or add --chat")
    return jobs


def parse_lines(text: str, source: str, sampling: Mapping[str, Any]) -> list[Job]:
    """One job per line that is not blank; lines are JSON objects if the first one is."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{source} contains no prompt: every line is blank")
    if not lines[0][1].lstrip().startswith("{"):
        params = options.sampling(sampling)
        return [Job(line, params) for _, line in lines]
    return [_parse_json_line(line, f"{source}, line {number}", sampling) for number, line in lines]


def _parse_json_line(line: str, where: str, sampling: Mapping[str, Any]) -> Job:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequest(f'{where} must be an object with either "prompt" or "messages"')
    own = {key: value for key, value in fields.items() if key not in ("prompt", "messages", "id")}
    # An embedding is no text to print: LLM.embed and /v1/embeddings make them.
    known = {item.name for item in dataclasses.fields(SamplingParams)} - {"pooling"}
    if unknown := sorted(set(own) - known):
        raise InvalidRequest(
            f"{where} has unknown fields {', '.join(unknown)}; sampling options are {sorted(known)}"
        )
    prompt = fields.get("prompt", fields.get("messages"))
    if isinstance(prompt, list) and not (prompt and all(_is_message(item) for item in prompt)):
        raise InvalidRequest(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
    if not isinstance(prompt, list if "messages" in fields else str):
        raise InvalidRequest(f"{where}: a prompt is text and messages are a list, got {prompt!r}")
    if "stop" in own and isinstance(own["stop"], str):
        own["stop"] = [own["stop"]]
    if "logit_bias" in own:  # JSON object keys are text
        own["logit_bias"] = _token_keys(own["logit_bias"], where)
    try:
        params = options.sampling({**sampling, **own})
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from error
    name = fields.get("id")
    return Job(prompt, params, None if name is None else str(name))


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
    )


def _token_keys(bias: Any, where: str) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError) as error:
        raise InvalidRequest(f"{where}: logit_bias maps token ids to numbers, got {bias!r}") from error


def run(model: str | None, config: "EngineConfig", jobs: list[Job]) -> tuple[list["RequestOutput"], float]:
    """All jobs in one batch, with a progress bar; returns outputs in order and the seconds they took."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    with load_llm(model, config) as llm:
        columns = (
            TextColumn("[dim]generating"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
        )
        with ProgressBar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task("", total=len(jobs), speed="")
            began_s = time.perf_counter()

            def on_progress(progress: "Progress") -> None:
                speed = progress.output_tokens / max(time.perf_counter() - began_s, 1e-9)
                bar.update(task, completed=progress.finished, speed=f"{speed:.1f} tok/s")

            params = [job.params for job in jobs]
            if jobs[0].is_chat:
                outputs = llm.chat([job.messages for job in jobs], params, on_progress=on_progress)
            else:
                outputs = llm.generate([job.shown for job in jobs], params, on_progress=on_progress)
            return outputs, time.perf_counter() - began_s


def report(
    jobs: list[Job], outputs: list["RequestOutput"], elapsed_s: float, why: bool, json_file: Path | None
) -> None:
    """Texts on stdout, errors and the speed on stderr, stories where asked, and the JSON report."""
    to_stdout = json_file is None or str(json_file) != "-"
    alone = len(outputs) == 1 and len(outputs[0].samples) == 1
    for number, (job, output) in enumerate(zip(jobs, outputs, strict=True), 1):
        if output.error:
            print_error(InvalidRequest(f"prompt {number}: {output.error}"))
        for sample in output.samples if to_stdout else ():
            if not alone:
                mark = f"{job.name or number}" + (f".{sample.index + 1}" if len(output.samples) > 1 else "")
                out.print(f"[bold cyan]{mark}[/bold cyan] ", end="")
                out.print(" ".join(job.shown.split()), style="dim", markup=False, soft_wrap=True)
            out.print(sample.text, markup=False, soft_wrap=True)
        if why:
            err.print(f"[bold]why[/bold] [dim]{output.request_id}[/dim]")
            err.print(output.story.describe(), markup=False, soft_wrap=True, style="dim")
    tokens = sum(len(sample.token_ids) for output in outputs for sample in output.samples)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    note(f"{prompts} prompt tokens, {tokens} new tokens in {elapsed_s:.2f} s: {tokens / elapsed_s:.1f} tok/s")
    rows = [
        Row("output tokens per second", tokens / elapsed_s, "tok/s"),
        Row("output tokens", tokens, "tokens"),
        Row("prompt tokens", prompts, "tokens"),
        Row("time", elapsed_s, "s", better="lower"),
    ]
    write_json(json_file, rows, outputs=[_as_dict(*pair) for pair in zip(jobs, outputs, strict=True)])


def _as_dict(job: Job, output: "RequestOutput") -> dict[str, Any]:
    return {
        "id": job.name or output.request_id,
        "prompt": job.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "samples": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "cumulative_logprob": sample.cumulative_logprob,
                "logprobs": _logprobs(sample.logprobs),
            }
            for sample in output.samples
        ],
        "error": output.error,
        "story": output.story.to_dict(),
    }


def _logprobs(entries: Any) -> list[dict[str, Any]] | None:
    return None if entries is None else [dataclasses.asdict(entry) for entry in entries]

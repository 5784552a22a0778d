"""`cumulo explain`: what happened to a request of a running server, and why."""

import json
from pathlib import Path
from typing import Any

import typer

from cumulo.base import report
from cumulo.base.files import write_text_file
from cumulo.base.quantities import quantity
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import note, only_json, out, show_report
from cumulo.errors import CumuloError

EXAMPLE = (
    "Example: [bold]cumulo explain last --trace story.json[/bold], then open the file in ui.perfetto.dev"
)


def explain(
    request_id: str = typer.Argument(
        ..., metavar="ID", help="The `id` of an answer, its short form, `last`, or `step`."
    ),
    number: int | None = typer.Argument(
        None, metavar="N", help="After `step`: the training step.", show_default=False
    ),
    folder: Path | None = typer.Option(
        None, metavar="DIR", help="With `step N`: the folder of a training run.", show_default=False
    ),
    server: str = typer.Option("http://127.0.0.1:8000", help="Address of the server."),
    api_key: str | None = typer.Option(
        None, help="API key, if the server requires one.", envvar="OPENAI_API_KEY"
    ),
    trace: Path | None = typer.Option(None, help="Also write a Chrome/Perfetto trace to this file."),
    json_file: options.JsonOption = None,
) -> None:
    """Explain a request of a running server: queueing, prefix cache hits, chunks, preemptions and latencies.

    `cumulo explain step 5 --folder RUN` shows the collectives of a training step: time, bus bandwidth, prediction.
    """
    if request_id == "step":
        print_step(folder, number, json_file)
        return
    story = _get(server, request_id, api_key)
    if json_file is not None:
        text = json.dumps(story, indent=2) + "\n"
        if only_json(json_file):
            print(text, end="")
            return
        write_text_file(json_file, text)
    for request in story["data"]:
        out.print(request["id"], style="bold")
        out.print(request["summary"], soft_wrap=True)
        for event in request["events"]:
            out.print(f"{event['at_ms']:10.1f} ms  {event['words']}", soft_wrap=True)
    if trace is not None:
        write_text_file(trace, json.dumps(_get(server, request_id, api_key, "trace")))
        note(f"trace written to {trace}; open it in https://ui.perfetto.dev")


def _get(server: str, request_id: str, api_key: str | None, form: str = "json") -> dict[str, Any]:
    # Here, because every command's help would wait for them: they take as long as all of this package's own.
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    name = urllib.parse.quote(request_id, safe="")
    address = server if "://" in server else f"http://{server}"
    url = f"{address.rstrip('/')}/v1/requests/{name}/explain?format={form}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            content: dict[str, Any] = json.load(answer)
            return content
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{error.code} {error.reason}"
        hint = (
            " (with this command: --api-key KEY, or the variable OPENAI_API_KEY)" if error.code == 401 else ""
        )
        raise CumuloError(f"{server} answered: {message}{hint}") from error
    except (OSError, ValueError, http.client.InvalidURL) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise CumuloError(
            f"no Cumulo server answers at {server} ({reason}); give its address with --server"
        ) from error


def print_step(folder: Path | None, step: int | None, json_file: Path | None) -> None:
    from cumulo.train.run.log import CollectiveRecord, read_log, read_records

    if folder is None or step is None:
        raise CumuloError("say which step of which run: cumulo explain step 5 --folder runs/train")
    record = next((one for one in read_log(folder / "log.csv") if one.step == step), None)
    if record is None:
        raise CumuloError(f"{folder}/log.csv has no step {step}")
    found = [one for one in read_records(folder / "collectives.csv", CollectiveRecord) if one.step == step]
    rows = [report.Row("step", record.step_s * 1e3, "ms", "lower", note=f"loss {record.loss:.3f}")]
    total = sum(one.seconds for one in found)
    share = f"{total / record.step_s:.0%} of the step; waiting for other ranks counts, overlapped time too"
    rows.append(report.Row("collectives of rank 0", total * 1e3, "ms", "lower", note=share))
    for one in found:
        name = f"{one.collective}, {one.ranks} ranks, {quantity(one.size_bytes, 'B')} × {one.calls}"
        note = f"bus bandwidth {one.bus_gb_s:.3f} GB/s; predicted {one.predicted_s * 1e3:,.2f} ms"
        rows.append(report.Row(name, one.seconds * 1e3, "ms", "lower", note=note))
    show_report(f"step {step} of {folder}", rows, json_file)

"""`cumulo explain`: what happened to a request of a running server, and why."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cumulo.cli.shared import options

EXAMPLE = (
    "Example: [bold]cumulo explain last --trace story.json[/bold], then open the file in ui.perfetto.dev"
)


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The `id` of an answer, its short form, `last`, or `step`.",
        ),
    ],
    number: Annotated[
        int | None, typer.Argument(metavar="N", help="After `step`: the training step.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="With `step N`: the folder of a training run.", show_default=False)
    ] = None,
    server: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="API key, if the server requires one.", envvar="OPENAI_API_KEY")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a Chrome/Perfetto trace to this file.")
    ] = None,
    json_file: options.JsonOption = None,
) -> None:
    """Explain a request of a running server: queueing, prefix cache hits, chunks, preemptions and latencies.

    `cumulo explain step 5 --folder RUN` shows the collectives of a training step: time, bus bandwidth, prediction.
    """
    from cumulo.base.files import write_text_file
    from cumulo.cli.shared.terminal import note, out

    if request_id == "step":
        from cumulo.cli.view.training_step import print_step

        print_step(folder, number, json_file)
        return
    story = _get(server, request_id, api_key)
    if json_file is not None:
        text = json.dumps(story, indent=2) + "\n"
        if str(json_file) == "-":
            print(text, end="")
            return
        write_text_file(json_file, text)
    for request in story["data"]:
        out.print(f"[bold]{request['id']}[/bold]", highlight=False)
        out.print(request["summary"], markup=False, soft_wrap=True)
        for event in request["events"]:
            out.print(f"{event['at_ms']:10.1f} ms  {event['words']}", markup=False, soft_wrap=True)
    if trace is not None:
        write_text_file(trace, json.dumps(_get(server, request_id, api_key, "trace")))
        note(f"trace written to {trace}; open it in https://ui.perfetto.dev")


def _get(server: str, request_id: str, api_key: str | None, form: str = "json") -> dict[str, Any]:
    # Here, because every command's help would wait for them: they take as long as all of this package's own.
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    from cumulo.errors import CumuloError

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

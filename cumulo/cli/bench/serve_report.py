"""What `cumulo bench serve` shows: live progress, rows, a table, and the files it writes."""

import json
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from cumulo import __version__
from cumulo.base.figures import RunFigure, figure_table
from cumulo.base.files import write_text_file
from cumulo.base.quantities import number, quantity
from cumulo.base.report import Row, machine, table, write_json
from cumulo.cli.shared.terminal import err, note, only_json, out, text_column
from cumulo.load.campaign import Campaign, LevelResult, Replay
from cumulo.load.html_report import level_figures, page
from cumulo.load.player import Level
from cumulo.load.summary import Spread

PERCENTILES = ("p50", "p90", "p95", "p99")
BUSY_CORE_SHARE = 0.7  # above this the generator may be what is measured


class View:
    """One line of live progress on stderr, drawn between tokens and never from another thread.

    Where stderr is no terminal, a line per level instead.
    """

    def __init__(self) -> None:
        columns = (
            text_column("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeElapsedColumn(), text_column("{task.fields[now]}", "dim"),
        )  # fmt: skip
        self.progress = Progress(
            *columns, console=err, transient=True, auto_refresh=False, disable=not err.is_terminal
        )
        self._task = self.progress.add_task("", total=None, now="")
        self._seen_tokens = 0
        self._seen_s = 0.0

    def begin(self, label: str, number: int, levels: int | None) -> None:
        place = f"{number + 1}/{levels} " if levels and levels > 1 else ""
        self._seen_tokens, self._seen_s = 0, 0.0
        self.progress.reset(self._task, description=f"{place}{label}", total=None, now="")
        self.progress.refresh()

    def look(self, level: Level) -> None:
        if not err.is_terminal:
            return
        import asyncio

        now_s = asyncio.get_running_loop().time() - level.began_s
        tokens = sum(len(record.chunk_times_s) for record in level.records)
        tokens += sum(len(answer.chunk_times_s) for _, answer in level.running.values())
        tok_s = (tokens - self._seen_tokens) / max(now_s - self._seen_s, 1e-6)
        self._seen_tokens, self._seen_s = tokens, now_s
        recent = [record.ttft_s for record in level.records[-50:] if record.ttft_s is not None]
        ttft = quantity(statistics.median(recent), "s") if recent else "-"
        failed = sum(record.error is not None for record in level.records)
        now = f"{len(level.running)} running · {tok_s:,.0f} tok/s · TTFT {ttft}"
        now += f" · {failed} failed" if failed else ""
        self.progress.update(self._task, completed=len(level.records), total=level.schedule.requests, now=now)
        self.progress.refresh()

    def end(self, result: LevelResult) -> None:
        if not err.is_terminal and result.summary.requests:
            summary = result.summary
            ttft = quantity(summary.ttft_s.p50, "s") if summary.ttft_s is not None else "-"
            note(
                f"{result.label}: {summary.succeeded} of {summary.requests} requests, "
                f"{number(summary.output_tok_s)} tokens/s, TTFT p50 {ttft}"
            )


def rows(campaign: Campaign) -> list[Row]:
    """Every figure of every level. Only a single run is judged: a sweep goes too far on purpose."""
    results = campaign.results
    is_single = len(results) == 1 and campaign.search is None
    found: list[Row] = []
    if campaign.search is not None:
        how = campaign.search_end or "confirmed by a second trial"
        found.append(
            Row("highest rate that meets the SLO", campaign.search.confirmed, "requests/s", must=0.0,
                note=f"{campaign.settings.slo}; {how}")
        )  # fmt: skip
    for trial, result in enumerate(results, start=1):
        prefix = "" if is_single else f"{result.label}: "
        if campaign.search is not None:
            prefix = f"trial {trial}, {result.label}: "
        found += _level_rows(prefix, result, campaign, is_single)
    return found


def _level_rows(prefix: str, result: LevelResult, campaign: Campaign, is_single: bool) -> list[Row]:
    summary = result.summary
    kinds = ", ".join(f"{count} × {kind}" for kind, count in summary.errors.items())
    made = [
        Row(f"{prefix}output throughput", summary.output_tok_s, "tokens/s"),
        Row(f"{prefix}requests completed", summary.completed_req_s, "requests/s",
            note=f"{summary.offered_req_s:.3g}/s offered"),
        Row(f"{prefix}requests failed", result.failed, f"of {summary.requests}", "lower",
            must=0 if is_single else None, note=kinds),
    ]  # fmt: skip
    for name, spread in summary.spreads.items():
        for percentile in PERCENTILES:
            value = _at(spread, percentile)
            made.append(
                Row(f"{prefix}{name} {percentile}", None if value is None else value * 1e3, "ms", "lower")
            )
    slo = campaign.settings.slo
    if slo is not None:
        made += [
            Row(f"{prefix}goodput", summary.goodput_req_s, "requests/s", note=str(slo)),
            Row(f"{prefix}met the SLO", summary.slo_share, "of requests",
                must=slo.share if is_single else None, note=result.verdict or ""),
        ]  # fmt: skip
    late = _at(summary.lateness_s, "p99")
    busy = " (the load generator may be the bottleneck)" if result.cpu_share > BUSY_CORE_SHARE else ""
    made += [
        Row(f"{prefix}sent late p99", None if late is None else late * 1e3, "ms", "lower"),
        Row(f"{prefix}load generator's share of a core", result.cpu_share, "", "lower",
            note=f"at most {result.most_running} concurrent requests{busy}"),
    ]  # fmt: skip
    return made


def levels_table(campaign: Campaign) -> Table:
    """Several levels side by side, one line each, in the 80 columns of a plain terminal."""
    searched, any_failed = campaign.search is not None, any(level.failed for level in campaign.results)
    hidden = {"good/s" if searched else "verdict", "" if any_failed else "fail"}
    columns = level_figures(campaign.settings.slo is not None, whole=False)
    named = [(level.label, level) for level in campaign.results]
    made = figure_table("load", named, [one for one in columns if one.heading not in hidden], "levels")
    made.padding = (0, 1, 0, 0)
    return made


def latencies_table(result: LevelResult) -> Table:
    """A single level's latencies: a line for each kind, a column for each percentile."""
    columns = [RunFigure("", partial(_at, percentile=one), "s", heading=one) for one in PERCENTILES]
    return figure_table("", result.summary.spreads.items(), columns, "latencies")


def finish(campaign: Campaign, json_file: Path | None, html: Path | None, records: Path | None) -> None:
    """Show the results and write the files that were asked for."""
    console = err if only_json(json_file) else out
    made = rows(campaign)
    title = f"{campaign.target.model} at {campaign.url}"
    if len(campaign.results) == 1 and campaign.search is None:
        console.print(
            table(
                title, [row for row in made if not row.name.endswith(PERCENTILES) or "sent late" in row.name]
            )
        )
        console.print(latencies_table(campaign.results[0]))
    else:
        if campaign.results:
            console.print(levels_table(campaign))
        if campaign.search is not None:
            # Why a search ended early is a sentence of its own rather than a narrow column.
            shown = replace(made[0], note=str(campaign.settings.slo)) if campaign.search_end else made[0]
            console.print(table(title, [shown]))
            if campaign.search_end:
                note(campaign.search_end)
    _warn(campaign)
    details = [_details(result) for result in campaign.results]
    write_json(json_file, made, server=_server(campaign), levels=details)
    found = None if campaign.search is None else campaign.search.confirmed
    here = machine()
    told = f"{here['cpu']}, {here['cores']} cores, {here['platform']}, cumulo {__version__}"
    facts = {"Server": campaign.url, "Workload": _workload(campaign), "Measured from": told}
    if campaign.search_end:
        facts["Search"] = campaign.search_end
    if html is not None:
        title = f"Load on {campaign.target.model}"
        write_text_file(html, page(title, facts, campaign.results, campaign.settings.slo, found))
    if records is not None:
        lines = (
            {"level": level.label} | record.as_dict()
            for level in campaign.results
            for record in level.records
        )
        write_text_file(records, "".join(json.dumps(line) + "\n" for line in lines))


def _warn(campaign: Campaign) -> None:
    busiest = max((result.cpu_share for result in campaign.results), default=0.0)
    if busiest > BUSY_CORE_SHARE:
        note(f"the load generator used {busiest:.0%} of a core: it may limit the results, not the server")
    if not campaign.target.dialect.ignore_eos:
        note("the server does not accept ignore_eos: answers may be shorter than planned")
    if not campaign.target.dialect.usage:
        note("the server does not report token counts in its streams: each chunk counts as one token")


def _details(result: LevelResult) -> dict[str, Any]:
    return {
        "load": result.label,
        "verdict": result.verdict,
        "ended_early": result.stopped,
        "generator_core_share": result.cpu_share,
        "most_at_once": result.most_running,
    } | asdict(result.summary)


def _server(campaign: Campaign) -> dict[str, Any]:
    settings, dialect, ruler = campaign.settings, campaign.target.dialect, campaign.ruler
    return {
        "url": campaign.url, "model": campaign.target.model, "endpoint": campaign.target.endpoint,
        "workload": _workload(campaign), "seed": settings.seed,
        "slo": None if settings.slo is None else str(settings.slo), "ignore_eos": dialect.ignore_eos,
        "counts_tokens": dialect.usage, "tokens_per_word": ruler.tokens_per_word,
        "template_tokens": ruler.overhead_tokens,
    }  # fmt: skip


def _workload(campaign: Campaign) -> str:
    work = campaign.settings.workload
    if any(isinstance(load, Replay) for load in campaign.settings.loads):
        return "a recorded trace"
    words = f"prompts of {work.input_tokens} tokens, answers of {work.output_tokens}"
    if work.prefix_tokens:
        words += f"; {work.prefixes} shared prefixes of {work.prefix_tokens} tokens"
    if str(work.turns) != "1":
        words += f"; conversations of {work.turns} turns"
    return words


def _at(spread: Spread | None, percentile: str) -> float | None:
    return None if spread is None else float(getattr(spread, percentile))

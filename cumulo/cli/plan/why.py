"""`cumulo plan why`: why two planning commands give different answers, one changed option after the other."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import marked, present, working
from cumulo.errors import ConfigError

EXAMPLE = (
    'Example: [bold]cumulo plan why "train llama-3.1-8b --gpus 64 --batch 512 --tokens 1e12" '
    '"cluster llama-3.1-8b --gpus 64 --batch 512 --sequence 4096 --tokens 1e12"[/bold]'
)
Command = Annotated[str, typer.Argument(help="What follows `cumulo plan`, in quotation marks.")]
# Figures that tell plans apart, the first that both have: their names in the reports of train, cluster and serve.
_FIGURES = {
    "price of the run": (("cost_run", "price"), "USD"),
    "price": (("price, total",), "USD/h"),
    "run time": (("days", "run time"), "days"),
    "step time": (("step_s", "step time"), "s"),
}
_NO_PART = ("json_file", "help", "why", "phases", "typer_context")  # options that change no figure


@dataclass(frozen=True, slots=True)
class PlanCommand:
    verb: str
    given: Mapping[str, tuple[str, ...]]  # words of each option and argument that is not the default, by name

    def words(self) -> list[str]:
        return [self.verb, *(word for words in self.given.values() for word in words)]


def why(first: Command, second: Command, json_file: JsonOption = None) -> None:
    """Say why two plans differ: the first command becomes the second, one option after the other.

    Every line is a plan that was computed, with what its change makes of the price, or where a plan has none, of
    the run time or the step time. What comes first takes the blame for what two options do together.
    """
    one, other = _read(first), _read(second)
    lines: list[tuple[str, Mapping[str, float] | str]] = []
    with working("planning") as tell:
        for told, command in _walk(one, other):
            tell(told)
            lines.append((told, _figures(command)))
    ends = lines[0][1], lines[-1][1]
    for end in ends:
        if isinstance(end, str):
            raise ConfigError(end)
    names = [name for name in _FIGURES if all(name in end for end in ends)]
    if not names:
        raise ConfigError("the two plans have no figure in common: neither price, run time nor step time")
    rows: list[Row] = []
    shown: list[tuple[str, ...]] = []
    before: Mapping[str, float] = {}
    for told, found in lines:
        if isinstance(found, str):
            rows.append(Row(told, found))
            shown.append((*("" for _ in names), "", f"{told}: {found}"))
            continue
        value = found[names[0]]
        change = f"{value / before[names[0]] - 1:+.1%}" if before else ""
        causes = ", ".join(_causes(before, found)) if before else ""
        rows.append(
            Row(told, value, _FIGURES[names[0]][1], "lower", note="; ".join(filter(None, (change, causes))))
        )
        figures = [quantity(found[name], _FIGURES[name][1]) if name in found else "" for name in names]
        shown.append((*figures, change, f"{told}\n  {causes}" if causes else told))
        before = found
    title = marked("{}, one change after the other", names[0])
    present(rows, json_file, title, grid((*names, "change", "plan"), shown, left=(0, len(names) + 1)))


def _causes(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """What a cluster trains with, and the parts of a step that changed most; their seconds are by "part NAME"."""
    if {"job_gpus", "ettr"} <= set(now):
        yield f"{now['job_gpus']:,} GPUs train, {now['ettr']:.1%} of the time"
        return
    parts = {name for name in (*before, *now) if name.startswith("part ")}
    change = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in parts}
    for name, seconds in sorted(change.items(), key=lambda one: -abs(one[1]))[:3]:
        if abs(seconds) > 0.01 * sum(now.get(one, 0.0) for one in parts):
            yield f"{name.removeprefix('part ')} {'+' if seconds > 0 else '-'}{quantity(abs(seconds), 's')}"


def _walk(one: PlanCommand, other: PlanCommand) -> Iterator[tuple[str, PlanCommand]]:
    """From one to the other; options that the second verb does not have leave with the first."""
    yield shlex.join(one.words()), one
    given, verb = dict(one.given), one.verb
    if verb != other.verb:
        verb = other.verb
        left = [name for name in given if name not in _names(verb)]
        for name in left:
            del given[name]
        words = f" (without {shlex.join(word for name in left for word in one.given[name])})" if left else ""
        yield f"asked of {verb}{words}", PlanCommand(verb, dict(given))
    for name in dict.fromkeys((*given, *other.given)):
        if given.get(name) != other.given.get(name):
            if name in other.given:
                given[name] = other.given[name]
                told = shlex.join(other.given[name])
            else:
                told = f"without {shlex.join(given.pop(name))}"
            yield told, PlanCommand(verb, dict(given))


def _command(verb: str) -> Any:
    from cumulo.cli.app import application

    if verb not in ("train", "serve", "cluster"):
        raise ConfigError(f"`cumulo plan why` compares plans of train, serve and cluster; got {verb!r}")
    whole: Any = typer.main.get_command(application(["plan", verb]))
    return whole.commands["plan"].commands[verb]


def _names(verb: str) -> set[str]:
    return {param.name or "" for param in _command(verb).params}


def _read(text: str) -> PlanCommand:
    try:
        verb, *words = shlex.split(text.removeprefix("cumulo ").removeprefix("plan ")) or [""]
    except ValueError as error:
        raise ConfigError(f"{text!r} is no command: {error}") from error
    command = _command(verb)
    context = command.make_context(f"cumulo plan {verb}", words)
    given = {}
    for param in command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        if name not in _NO_PART and source is not None and source.name == "COMMANDLINE":
            given[name] = _written(param, context.params[name])
    return PlanCommand(verb, given)


def _written(param: Any, value: Any) -> tuple[str, ...]:
    if param.param_type_name == "argument":
        return (str(value),)
    if isinstance(value, bool):
        return (param.opts[0] if value else (param.secondary_opts or param.opts)[0],)
    return (param.opts[0], f"{value:.12g}" if isinstance(value, float) else str(value))


def _figures(command: PlanCommand) -> Mapping[str, float] | str:
    """By the names of `_FIGURES`; a text: the plan was refused, for this reason."""
    words: Sequence[str] = command.words()
    done = subprocess.run(
        [sys.executable, "-m", "cumulo", "plan", *words, "--json", "-"], capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        return "refused: " + " ".join(done.stderr.split()).removeprefix("error: ")[:200]
    report = json.loads(done.stdout)
    rows = {row["name"]: row["value"] for row in report["rows"]}
    plans = report.get("plans") or [{}]
    parts = {f"part {name}": seconds for name, seconds in plans[0].get("breakdown_s", {}).items()}
    found = {
        name: next((rows[one] for one in ones if one in rows), None) for name, (ones, _) in _FIGURES.items()
    }
    parts |= {name: rows[name] for name in ("job_gpus", "ettr") if name in rows}
    return parts | {name: value for name, value in found.items() if isinstance(value, int | float)}

"""Options of a command as one dataclass: its fields are the options, and a field that is a dataclass is a group.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        port: int = option("Port to listen on; 0: any free port.", 8000)
        lenient: bool = flag("Ignore unknown fields of requests.")
        max_queue: int = LIMITS("Maximum number of queued requests.", 1024)  # of LIMITS = Panel("Limits")
        engine: EngineOptions = EngineOptions()

    @takes_options
    def serve(chosen: ServeOptions) -> None: ...

A group is declared once and used by several commands; its instance in a command gives the defaults there, and its
PANEL the title under which the help shows its options.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING
_CONTEXT = "typer_context"
_typed: ContextVar[Mapping[str, str]] = ContextVar("typed", default=MappingProxyType({}))


def option(help: str, default: Any = REQUIRED, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """A field that is an option; `flags` name it where its field's name does not. Seconds are options without their
    unit: `idle_timeout_s` is --idle-timeout."""
    found = typer.Option(*flags, help=help, rich_help_panel=panel, **more)
    return dataclasses.field(default=default, metadata={"option": found, "named": bool(flags)})


def flag(help: str, panel: str | None = None) -> Any:
    """A field that is an option without a value: False, unless it is typed."""
    return dataclasses.field(
        default=False, metadata={"option": typer.Option(help=help, rich_help_panel=panel), "flag": True}
    )


class Panel(str):
    """The title of a panel of the help; called, it declares an option in this panel."""

    def __call__(self, help: str, default: Any = REQUIRED, *flags: str, **more: Any) -> Any:
        return option(help, default, *flags, panel=self, **more)

    def flag(self, help: str) -> Any:
        return flag(help, self)


def argument(help: str, default: Any = REQUIRED, metavar: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"option": typer.Argument(help=help, metavar=metavar)})


def group(
    default: Any = REQUIRED, without: tuple[str, ...] = (), helps: Mapping[str, str] | None = None
) -> Any:
    """A field that is a group, less the options the command does not offer, with help texts of its own, also for
    groups inside."""
    return dataclasses.field(default=default, metadata={"without": without, "helps": helps or {}})


def takes_options(command: Callable[[T], None]) -> Callable[..., None]:
    """The command as typer wants it: one parameter per option."""
    (kind,) = (hint for name, hint in get_type_hints(command).items() if name != "return")

    def run(**given: Any) -> None:
        context: typer.Context | None = given.pop(_CONTEXT, None)
        token = _typed.set(_from_command_line(context))
        try:
            command(_filled(kind, given, REQUIRED))
        finally:
            _typed.reset(token)

    parameters = list(_parameters(kind, REQUIRED, (), {}))
    parameters.append(inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    return run


def typed_flags() -> Mapping[str, str]:
    """The options of the running command that were typed, also where their value is the default: by name, how each
    is written on the command line."""
    return _typed.get()


def _from_command_line(context: typer.Context | None) -> Mapping[str, str]:
    if context is None:
        return {}
    sources = {one.name: context.get_parameter_source(one.name) for one in context.command.params if one.name}
    written = {one.name: one.opts[0] for one in context.command.params if one.name}
    return {
        name: written[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    }


def _parameters(
    kind: Any, usual: Any, without: tuple[str, ...], helps: Mapping[str, str]
) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, default, told = hints[field.name], _default(field, usual), field.metadata
        if dataclasses.is_dataclass(hint):
            inner = {**told.get("helps", {}), **helps}
            yield from _parameters(hint, default, told.get("without", ()), inner)
        elif field.name not in without:
            if "option" in told:
                found = copy.copy(told["option"])
                found.help = helps.get(field.name, found.help)
                found.rich_help_panel = found.rich_help_panel or getattr(kind, "PANEL", None)
                if "flag" in told or (field.name.endswith("_s") and not told.get("named", True)):
                    found.param_decls = (f"--{field.name.removesuffix('_s').replace('_', '-')}",)
                hint = Annotated[hint, found]
            default = inspect.Parameter.empty if default is REQUIRED else default
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )


def _filled(kind: Any, given: Mapping[str, Any], usual: Any) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        default = _default(field, usual)
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _filled(hints[field.name], given, default)
        else:
            values[field.name] = given.get(field.name, default)
    return kind(**values)


def _default(field: Any, usual: Any) -> Any:
    return field.default if usual is REQUIRED else getattr(usual, field.name)

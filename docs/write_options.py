"""Writes docs/serve-options.yaml, the options of `cumulo serve` as its help has them, panel by panel:

.venv/bin/python docs/write_options.py
"""

from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from cumulo.cli.app import application
from cumulo.cli.shared.help import use_plain_types

FILE = Path(__file__).parent / "serve-options.yaml"


def options_text(verb: str = "serve") -> str:
    command: Any = get_command(application([verb]))
    use_plain_types(command)
    context = command.context_class(command)
    panels: dict[str, dict[str, str]] = {}
    for one in command.commands[verb].get_params(context):
        if one.param_type_name != "option" or one.hidden or one.name == "help":
            continue
        names = ", ".join([*one.opts, *one.secondary_opts])
        shown = one.default is not None and one.default not in (False, "") and not callable(one.default)
        usual = f" Default: {one.default}." if shown else ""
        panels.setdefault(str(one.rich_help_panel or "Options"), {})[names] = f"{one.help}{usual}"
    return yaml.safe_dump(panels, sort_keys=False, width=110, allow_unicode=True)


if __name__ == "__main__":
    FILE.write_text(options_text(), "utf-8")

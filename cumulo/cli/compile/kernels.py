"""`cumulo compile kernels`: the names that `cumulo compile stages` takes."""

from cumulo.base.report import Row
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import dim, present, unwrapped

EXAMPLE = "Example: [bold]cumulo compile kernels[/bold]"


def kernels(json_file: JsonOption = None) -> None:
    """List the kernels that `cumulo compile stages` knows by name, with the constants of their launch."""
    from cumulo.compile.stages.launch import recorded

    launches = recorded()
    rows = [Row(name, None, more={"kernel": one.kernel}) for name, one in launches.items()]
    lines = []
    for name, one in launches.items():
        names = list(one.signature)
        constants = {
            names[int(path)] if path.isdigit() else path: value
            for path, value in one.constants.items()
            if isinstance(value, bool | int | float | str)
            and path.replace(".", "").isdigit()
            and "." not in path
        }
        told = ", ".join(f"{key}={value}" for key, value in constants.items() if key.isupper())
        lines.append(f"{name:<32} {told}")
    present(rows, json_file, unwrapped("\n".join(lines)), dim("A kernel of yours is FILE.py:FUNCTION."))

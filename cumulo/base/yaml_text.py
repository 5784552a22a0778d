"""What is wrong with a YAML text, in one line for the person who wrote it."""

from typing import Any


def yaml_problem(error: Any) -> str:
    """Of a `yaml.YAMLError`: the line, the column and the reason, without the parser's own words for its input."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    reason = problem.replace("'<stream end>'", "the end of the file").replace(
        "<stream end>", "the end of the file"
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"

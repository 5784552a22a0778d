"""YAML as people write it: keys that are given twice are named, and what is wrong is said in one line."""

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    """A key that is given twice is an error: YAML itself would drop the first one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """As `yaml.safe_load`, with an error for keys that are given twice."""
    try:
        return yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError("its brackets are nested too deeply") from None


def yaml_problem(error: Any) -> str:
    """Of a `yaml.YAMLError`: the line, the column and the reason, without the parser's own words for its input."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    reason = problem.replace("'<stream end>'", "the end of the file").replace(
        "<stream end>", "the end of the file"
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"

"""Real English text that is everywhere Python is: the language reference behind `help()`. For benchmarks."""

from cumulo.errors import CumuloError


def english() -> str:
    """About 600,000 characters of the Python language reference, topics in alphabetical order."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CumuloError(
            "this Python comes without pydoc_data, whose text the benchmark reads; use a complete Python"
        ) from error
    return "\n".join(text for _, text in sorted(topics.items()))

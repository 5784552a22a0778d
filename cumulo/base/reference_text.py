"""English text that is everywhere Python is: the language reference behind `help()`. Benchmarks read all of it;
quantisation is calibrated with one half and measured on the other.
"""

from typing import Literal

from cumulo.errors import CumuloError

Half = Literal["calibration", "held-out"]


def reference_text(half: Half | None = None) -> str:
    """About 600,000 characters, topics in alphabetical order; a half has every second topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CumuloError(
            "this Python comes without pydoc_data, whose text is read here; use a complete Python"
        ) from error
    texts = [text for _, text in sorted(topics.items())]
    if half is not None:
        texts = texts[0::2] if half == "calibration" else texts[1::2]
    return "\n".join(texts)

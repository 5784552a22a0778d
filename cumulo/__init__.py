"""Cumulo: an LLM cloud in one Python package.

`from cumulo import LLM, SamplingParams` is all most programs need. They are imported on first use,
so that `import cumulo` stays cheap and free of torch for the commands that only decide.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cumulo.engine.decide.params import Guide as Guide
    from cumulo.engine.decide.params import SamplingParams as SamplingParams
    from cumulo.engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Guide", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from cumulo.engine.llm import LLM

        return LLM
    if name in ("Guide", "SamplingParams"):
        from cumulo.engine.decide import params

        return getattr(params, name)
    raise AttributeError(f"module 'cumulo' has no attribute {name!r}")

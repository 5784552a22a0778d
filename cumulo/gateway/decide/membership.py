"""Whether a server may be a replica of a pool; if not, why, and what would work."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """What a server said of itself. Of servers other than Cumulo's only the models are known."""

    models: tuple[str, ...]
    version: str = ""
    fingerprint: str = ""
    tokenizer: str = ""


def refusal(
    url: str, wanted: str | None, told: Told, own_version: str, others: Iterable[tuple[str, Told]]
) -> str:
    """Empty if it may. `wanted`: the pool's model, where one was named. `others`: the replicas there are."""
    if told.version and told.version != own_version:
        return f"{url} runs Cumulo {told.version} and this gateway {own_version}: install the same version on both"
    if not told.models:
        return f"{url} serves no model: /v1/models lists none"
    if wanted is not None and wanted not in told.models:
        return (
            f"{url} serves {_names(told.models)}, not {wanted!r}: give it a pool of its own "
            f"(--pool {told.models[0]}={url}), or start it with --name {wanted}"
        )
    for other_url, other in others:
        same = [name for name in told.models if name in other.models and (wanted is None or name == wanted)]
        if same and told.tokenizer and other.tokenizer and told.tokenizer != other.tokenizer:
            return (
                f"{url} and {other_url} both call their model {same[0]!r}, but their tokenizers differ: they are "
                "different models; start one of them with another --name"
            )
    return ""


def stray(url: str, told: Told, others: Sequence[tuple[str, Told]]) -> str:
    """Servers given without a pool should be of one model. Empty if this one has a model of the others."""
    if not others or any(set(told.models) & set(other.models) for _, other in others):
        return ""
    other_url, other = others[0]
    return (
        f"{url} serves {_names(told.models)} and {other_url} serves {_names(other.models)}: replicas have "
        f"the same model; for several models use --pool {other.models[0]}={other_url} "
        f"--pool {told.models[0]}={url}"
    )


def _names(models: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in models[:5]) + (", …" if len(models) > 5 else "")

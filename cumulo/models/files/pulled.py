"""PulledModel: the models that `cumulo pull` has downloaded, one folder each, whose `model.json` is written last.
Read by the verbs `list`, `show` and `remove`, by the server, and by `resolve`.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from cumulo.base.files import write_whole
from cumulo.base.nearest import did_you_mean
from cumulo.errors import ModelError

_NOTE = "model.json"
_HUB_PREFIXES = ("https://", "huggingface.co/", "hf.co/")
_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+|/[\w./-]+\.gguf)?")


@dataclass(frozen=True, slots=True)
class PulledModel:
    name: str  # as it was asked for: owner/name, owner/name:Q4_K_M or owner/name/file.gguf
    folder: Path
    file: str  # the GGUF file in the folder, of a split model the first; empty: the folder is the model
    license: str  # as the hub calls it; empty: it does not say
    hub: str
    revision: str  # commit
    size_bytes: int
    pulled_s: float  # since the epoch

    @property
    def path(self) -> Path:
        return self.folder / self.file if self.file else self.folder


def models_folder() -> Path:
    """In the user's data directory, as the XDG specification names it."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cumulo" / "models"


def short_name(text: str) -> str | None:
    """A hub's name of a model without the address that some write before it; None: it is no such name."""
    name = text.strip()
    for prefix in _HUB_PREFIXES:
        name = name.removeprefix(prefix)
    named = _NAME.fullmatch(name) and not any(set(part) <= {"."} for part in re.split(r"[/:]", name))
    return name if named else None


def folder_of(name: str) -> Path:
    return models_folder() / re.sub(r"[/:]", "--", name)


def pulled_models() -> list[PulledModel]:
    """All that are complete, by name; a damaged note is as good as none."""
    found = []
    for path in models_folder().glob(f"*/{_NOTE}"):
        try:
            fields = json.loads(path.read_text("utf-8"))
            found.append(PulledModel(**{**fields, "folder": path.parent}))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda one: one.name.lower())


def find_pulled(name: str) -> PulledModel | None:
    short = short_name(name)
    return next((one for one in pulled_models() if one.name == short), None)


def keep_pulled(model: PulledModel) -> None:
    fields = {name: value for name, value in asdict(model).items() if name != "folder"}
    write_whole(model.folder / _NOTE, json.dumps(fields, indent=1).encode())


def remove_pulled(name: str) -> PulledModel:
    """Delete its files, those of an unfinished download included; raises ModelError."""
    model, short = find_pulled(name), short_name(name)
    folder = model.folder if model is not None else folder_of(short) if short else None
    if folder is None or not folder.is_dir():
        known = [one.name for one in pulled_models()]
        told = did_you_mean(name, known, quoted=True, otherwise="; cumulo list shows the models that are")
        raise ModelError(f"{name!r} has not been pulled{told}")
    try:
        (folder / _NOTE).unlink(missing_ok=True)  # first: half a model is none
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be deleted: {error.strerror}") from error
    return model or PulledModel(short or name, folder, "", "", "", "", 0, 0.0)

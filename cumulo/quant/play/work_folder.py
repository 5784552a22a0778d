"""WorkFolder: an unfinished run on disk, next to its result. What is finished is kept and checked when a run
resumes; at the end the folder becomes the result.

Layers are written as the files of the result; `state.json` names those that are complete, with their checksums, and
the hidden states of the calibration text behind the last of them.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cumulo.base.files import write_whole
from cumulo.errors import ConfigError

SUFFIX = ".quantizing"
_STATE = "state.json"


class WorkFolder:
    def __init__(self, output: Path, run: Mapping[str, Any]) -> None:
        """`run` says what is being made: a folder of another run is refused, not overwritten."""
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"{output} exists already; choose another --output, or remove it")
        self.output, self.path = output, output.with_name(output.name + SUFFIX)
        self._run = json.loads(json.dumps(run))
        self._files: dict[str, str] = {}  # finished file: sha256
        self.finished_layers = 0
        self._resume()

    def _resume(self) -> None:
        try:
            state = json.loads((self.path / _STATE).read_text("utf-8"))
        except FileNotFoundError:
            self._begin()
            return
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path / _STATE} cannot be read; remove the folder to start anew"
            ) from error
        if state.get("run") != self._run:
            raise ConfigError(
                f"{self.path} is an unfinished run with other options or of another model; repeat its options, or "
                "remove the folder"
            )
        self._files = dict(state["files"])
        damaged = [name for name, digest in self._files.items() if _hash(self.path / name) != digest]
        if damaged:
            self._begin()  # hidden states of an earlier layer are gone: nothing can be computed from the middle
            return
        self.finished_layers = int(state["finished_layers"])

    def _begin(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror or error}") from error
        self._files, self.finished_layers = {}, 0
        self._write_state()

    def finish_layer(self, tensors: Mapping[str, Tensor], hidden: Tensor | None) -> None:
        """Keep a layer's tensors and what the next layer reads."""
        done, before = self.finished_layers, self._hidden_name(self.finished_layers)
        self._keep(self.layer_name(done), tensors)
        if hidden is not None:
            self._keep(self._hidden_name(done + 1), {"hidden": hidden})
            self._files.pop(before, None)
        self.finished_layers = done + 1
        self._write_state()
        (self.path / before).unlink(missing_ok=True)

    def hidden(self) -> Tensor:
        return load_file(self.path / self._hidden_name(self.finished_layers))["hidden"]

    def add(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._keep(name, tensors)

    def finish(self) -> None:
        """The folder becomes the result."""
        for file in (self.path / _STATE, *self.path.glob("hidden-*")):
            file.unlink(missing_ok=True)
        if self.output.is_dir():
            self.output.rmdir()  # empty
        self.path.replace(self.output)

    @staticmethod
    def layer_name(layer: int) -> str:
        return f"layer-{layer:05d}.safetensors"

    @staticmethod
    def _hidden_name(layer: int) -> str:
        return f"hidden-{layer:05d}.safetensors"

    def _keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        aside = self.path / f"{name}.writing"
        try:
            save_file(
                {key: one.contiguous() for key, one in tensors.items()}, aside, metadata={"format": "pt"}
            )
        except Exception as error:  # the format's library raises its own kinds, also for a full disk
            raise ConfigError(f"cannot write {aside}: {error}") from error
        aside.chmod(0o644)  # the library makes files that only their owner reads
        digest = _hash(aside)
        assert digest is not None
        aside.replace(self.path / name)
        self._files[name] = digest

    def _write_state(self) -> None:
        state = {"run": self._run, "finished_layers": self.finished_layers, "files": self._files}
        write_whole(self.path / _STATE, json.dumps(state, indent=1).encode())


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def fingerprint(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.to(torch.int64).numpy().tobytes()).hexdigest()

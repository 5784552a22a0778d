"""The catalogue: devices, nodes, fabrics, clusters and models by name, from YAML. Planner and simulators ask it.

    device("h100-sxm"), model("llama-3.1-405b"), cluster(1024, device="h100-sxm")

A user's own file has the same tables (`devices:`, `nodes:`, `fabrics:`, `models:`) and goes on top of what ships:
`Catalog.load(Path("mine.yaml"))`, or `--catalog mine.yaml` on the command line.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.base.strict import build, package_yaml, read_yaml
from cumulo.errors import ConfigError, ModelError
from cumulo.spec.check import checked
from cumulo.spec.cluster import Cluster, Fabric
from cumulo.spec.device import Device, Node
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from cumulo.spec.model_file import from_dict

Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]  # kind -> name -> fields
_KINDS = ("devices", "nodes", "fabrics", "models")


@dataclass(frozen=True)
class Catalog:
    tables: Tables

    @staticmethod
    def load(*files: Path) -> "Catalog":
        """What ships with the package, and `files` on top."""
        tables = {kind: dict(package_yaml("cumulo.spec", f"catalog/{kind}.yaml")) for kind in _KINDS}
        for path in files:
            for kind, entries in _table(read_yaml(path, "the catalogue"), str(path)).items():
                if kind not in _KINDS:
                    raise ConfigError(f"{path} contains an unknown table {kind!r}{_nearest(kind, _KINDS)}")
                if not isinstance(entries, Mapping):
                    raise ConfigError(f"{path}: {kind} must be a table of names, got {entries!r}")
                tables[kind] |= entries
        return Catalog(tables)

    def names(self, kind: str) -> list[str]:
        return list(self.tables[kind])

    def device(self, name: str) -> Device:
        return build(Device, self._fields("devices", name), f"device {name}", by_hand=False)

    def node(self, name: str) -> Node:
        fields = self._fields("nodes", name)
        fields["device"] = self._fields("devices", str(fields.get("device")))
        return build(Node, {"scale_up_gpus": fields.get("gpus"), **fields}, f"node {name}", by_hand=False)

    def fabric(self, name: str) -> Fabric:
        return build(Fabric, self._fields("fabrics", name), f"fabric {name}", by_hand=False)

    def model(self, name: str) -> ModelSpec:
        return checked(from_dict(self._entry("models", name)), f"model {name}")

    def model_or_file(self, name: str) -> ModelSpec:
        """A name of the catalogue, or a folder (or file) with a Hugging Face configuration."""
        path = Path(name)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file() or name in self.names("models"):
            return self.model(name)
        try:
            return spec_from_config(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the configuration {file}: {error}") from error

    def cluster(
        self,
        gpus: int,
        device: str | None = None,
        node: str | None = None,
        fabric: str = "rail-infiniband",
    ) -> Cluster:
        """`gpus` of a device, in the first node of the catalogue that has it, or in the node named."""
        if node is None:
            if device is None:
                raise ConfigError("a cluster needs a device or a node: give --device or --node")
            node = self._node_with(device)
        found = self.node(node)
        if device is not None and found.device.name != self.device(device).name:
            raise ConfigError(
                f"node {node} contains {found.device.name}, not {device}; give only one of --node and --device"
            )
        return Cluster(found, gpus, self.fabric(fabric))

    def _node_with(self, device: str) -> str:
        self._entry("devices", device)  # an unknown name is refused with the nearest
        for name, fields in self.tables["nodes"].items():
            if fields.get("device") == device:
                return name
        raise ConfigError(
            f"no node in the catalogue contains {device}; add one under `nodes:` in your own file"
        )

    def _fields(self, kind: str, name: str) -> dict[str, Any]:
        return {"name": name, **self._entry(kind, name)}

    def _entry(self, kind: str, name: str) -> Mapping[str, Any]:
        entries = self.tables[kind]
        if name not in entries:
            raise ConfigError(f"the catalogue contains no {kind[:-1]} {name!r}{_nearest(name, entries)}")
        return _table(entries[name], f"{kind[:-1]} {name}")


@cache
def shipped(file: Path | None = None) -> Catalog:
    """The catalogue of the package, alone or with the user's own file on top."""
    return Catalog.load() if file is None else Catalog.load(file)


@cache
def device(name: str) -> Device:
    return shipped().device(name)


@cache
def node(name: str) -> Node:
    return shipped().node(name)


@cache
def fabric(name: str) -> Fabric:
    return shipped().fabric(name)


@cache
def model(name: str) -> ModelSpec:
    return shipped().model(name)


def cluster(
    gpus: int, device: str | None = None, node: str | None = None, fabric: str = "rail-infiniband"
) -> Cluster:
    return shipped().cluster(gpus, device, node, fabric)


def _table(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a table, got {content!r}")
    return content


def _nearest(name: str, known: Iterable[str]) -> str:
    names, wanted = list(known), str(name).lower()
    begun = [known_name for known_name in names if wanted and known_name.startswith(wanted)]
    close = begun[:3] or nearest(wanted, names, 3, 0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are: {', '.join(names)}"

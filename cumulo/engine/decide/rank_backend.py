"""By which means ranks exchange numbers inside a forward pass: a rule over where they are. The assembly asks it
before anything is loaded, and says the answer with its reason.

symmetric: ranks of one host read each other's GPU memory inside kernels. nccl: GPUs of several hosts, inside CUDA
graphs too. gloo: over host memory; CPUs always, and GPUs where nothing else works, without CUDA graphs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from cumulo.errors import ConfigError

Backend = Literal["symmetric", "nccl", "gloo"]
BACKENDS = ("auto", "symmetric", "nccl", "gloo")


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Where the ranks of an engine are, as its own host sees it."""

    device: str  # cpu or cuda
    own_ranks: int  # on rank 0's host
    remote_ranks: int = 0  # that join from other hosts
    gpus: int = 0  # of rank 0's host
    has_nccl: bool = False  # PyTorch was built with it

    @property
    def share_a_gpu(self) -> bool:
        return self.own_ranks > self.gpus


class BackendChoice(NamedTuple):
    backend: Backend
    why: str

    def __str__(self) -> str:
        return f"{_NAMES[self.backend]}, {self.why}"


_NAMES: dict[Backend, str] = {"symmetric": "symmetric memory", "nccl": "NCCL", "gloo": "gloo"}


def choose_backend(asked: Backend | Literal["auto"], places: RankPlaces) -> BackendChoice:
    """Raises ConfigError where it cannot work, with what would."""
    if places.device == "cpu":
        if asked in ("nccl", "symmetric"):
            raise ConfigError(
                f"rank_backend={asked} needs ranks on GPUs, and these run on CPUs: use gloo, or omit rank_backend"
            )
        return BackendChoice("gloo", "because the ranks run on CPUs")
    if asked != "auto":
        if obstacle := _obstacle(asked, places):
            raise ConfigError(f"rank_backend={asked} cannot work here: {obstacle}")
        return BackendChoice(asked, "as asked for")
    if not places.remote_ranks:
        return BackendChoice("symmetric", "because all ranks are on one host")
    away = f"because ranks are on other hosts ({places.remote_ranks})"
    if not places.has_nccl:
        return BackendChoice("gloo", f"{away} and this PyTorch has no NCCL: slow, without CUDA graphs")
    if places.share_a_gpu:
        shared = f"{places.own_ranks} ranks share {_gpus(places.gpus)} here"
        return BackendChoice("gloo", f"{away} and {shared}, which NCCL refuses: slow, without CUDA graphs")
    return BackendChoice("nccl", away)


def _obstacle(asked: Backend, places: RankPlaces) -> str:
    """Why GPUs cannot do it, and what works; empty: they can."""
    if asked == "symmetric" and places.remote_ranks:
        return "ranks of other hosts cannot read this host's GPU memory; use nccl, or omit rank_backend"
    if asked == "nccl" and not places.has_nccl:
        return "this PyTorch was built without NCCL; install a CUDA build of PyTorch for Linux, or use gloo"
    if asked == "nccl" and places.share_a_gpu:
        return (
            f"{places.own_ranks} ranks would share {_gpus(places.gpus)}, and NCCL takes one rank per GPU; start at "
            f"most {places.gpus} ranks on this host, or use gloo"
        )
    return ""


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

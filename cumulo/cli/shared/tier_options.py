"""Options of `cumulo serve` for KV blocks beyond the device: host memory and disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cumulo.cli.shared.declare import option


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    PANEL: ClassVar[str] = "KV cache in host memory and on disk"

    kv_host_gib: float = option(
        "Host memory for prefixes that leave the KV cache, in GiB: they are fetched from there instead of computed "
        "again.",
        0.0,
    )
    kv_disk: str = option(
        "Folder and size in GiB for prefixes that leave host memory, for example /var/cache/kv:100. They survive a "
        "restart, and the replicas of a host share them.",
        "",
        metavar="PATH:GIB",
    )
    swap_gib: float = option(
        "Host memory for the KV blocks of preempted sequences, in GiB; 0: preemption recomputes.", 0.0
    )

    def config(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        from cumulo.errors import CumuloError

        for name, value in (("--kv-host-gib", self.kv_host_gib), ("--swap-gib", self.swap_gib)):
            if not 0 <= value < float("inf"):
                raise CumuloError(f"{name} must be a size in GiB, 0 or more; got {value:g}")
        folder, gib = "", 0.0
        if self.kv_disk:
            folder, _, size = self.kv_disk.rpartition(":")
            try:
                gib = float(size.lower().removesuffix("gib"))
            except ValueError:
                gib = 0.0
            if not folder or not 0 < gib < float("inf"):
                raise CumuloError(
                    f"--kv-disk must be a folder and a size in GiB, such as /var/cache/kv:100; got {self.kv_disk!r}"
                )
            _check_disk(folder, gib)
        return {
            "kv_host_gib": self.kv_host_gib, "kv_disk": folder, "kv_disk_gib": gib, "swap_gib": self.swap_gib
        }  # fmt: skip


def _check_disk(folder: str, gib: float) -> None:
    """Refuse more than the whole disk: what is free on it may change, its size does not."""
    import shutil

    from cumulo.errors import CumuloError

    place = Path(folder).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    whole = shutil.disk_usage(place).total / (1 << 30)
    if gib > whole:
        raise CumuloError(f"--kv-disk {folder}:{gib:g} is more than its disk has, {whole:.0f} GiB in all")

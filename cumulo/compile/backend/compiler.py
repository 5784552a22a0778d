"""The compiler that Triton calls for a CPU: TTIR, then C++, then a shared library. Found by Triton's entry point.

`import triton` imports this file, so it imports nothing but Triton until a kernel is compiled.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

TARGET = GPUTarget("cumulo", "cpu", 1)


@dataclass(frozen=True)
class CpuOptions:
    """What launches may say. Most of it steers GPUs and changes nothing here."""

    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    warp_size: int = 1
    cluster_dims: tuple[int, ...] = (1, 1, 1)
    maxnreg: int | None = None
    launch_pdl: bool = False
    launch_cooperative_grid: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    ir_override: str | None = None
    enable_fp_fusion: bool = True
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e4nv", "fp8e5")
    deprecated_fp8_dtypes: tuple[str, ...] = ()
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    extern_libs: tuple[Any, ...] | None = None
    debug: bool = False
    backend_name: str = "cumulo"
    sanitize_overflow: bool = True
    arch: str = "cpu"
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class CpuBackend(BaseBackend):  # type: ignore[misc]
    binary_ext = "so"
    supports_native_tensor_specialization = False

    @staticmethod
    def get_tensor_specialization(arg: Any, **_: Any) -> str:
        return ""  # an address that is a multiple of 16 makes no other kernel here

    @staticmethod
    def get_int_specialization(arg: int, **_: Any) -> str:
        return ""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == TARGET.backend)

    def hash(self) -> str:
        return _version()

    def parse_options(self, options: dict[str, Any]) -> CpuOptions:
        known = CpuOptions.__dataclass_fields__
        return CpuOptions(
            **{name: value for name, value in options.items() if name in known and value is not None}
        )

    def add_stages(self, stages: dict[str, Any], options: CpuOptions, language: object = None) -> None:
        from cumulo.compile.backend.build import compile_source
        from cumulo.compile.backend.lower import lower

        if getattr(language, "name", "TRITON") != "TRITON":
            from cumulo.compile.backend.ttir import KernelRefused

            raise KernelRefused(
                "a Gluon kernel lays tensors out over a GPU's threads, so it cannot run on a CPU"
            )

        def to_cpp(module: Any, metadata: dict[str, Any]) -> str:
            source, metadata["arguments"] = lower(str(module))
            return source

        def to_library(source: str, metadata: dict[str, Any]) -> bytes:
            metadata["shared"] = 0  # bytes of a GPU's shared memory, which Triton compares with what there is
            return compile_source(source, options.enable_fp_fusion)

        stages["ttir"] = self._make_ttir
        stages["cpp"] = to_cpp
        stages["so"] = to_library

    @staticmethod
    def _make_ttir(module: Any, metadata: dict[str, Any]) -> Any:
        from triton._C.libtriton import ir, passes

        metadata["name"] = (
            module.get_entry_func_name() if hasattr(module, "get_entry_func_name") else "kernel"
        )
        manager = ir.pass_manager(module.context)
        manager.enable_debug()
        passes.common.add_inliner(manager)
        for rewrite in ("add_rewrite_tensor_pointer", "add_rewrite_tensor_descriptor_to_pointer"):
            if hasattr(passes.ttir, rewrite):
                getattr(passes.ttir, rewrite)(manager)
        passes.common.add_canonicalizer(manager)
        passes.ttir.add_combine(manager)
        passes.ttir.add_reorder_broadcast(manager)
        passes.common.add_cse(manager)
        passes.ttir.add_triton_licm(manager)
        passes.common.add_symbol_dce(manager)
        passes.ttir.add_loop_unroll(manager)
        manager.run(module, "make_ttir")
        return module

    def load_dialects(self, context: Any) -> None:
        """Triton's own are enough."""

    def get_codegen_implementation(self, options: CpuOptions) -> dict[str, Any]:
        return {"min_dot_size": lambda left, right: (1, 1, 1)}

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata


@cache
def _version() -> str:
    """Changes when a kernel compiled before must not be used: other sources of ours, another compiler or CPU."""
    from cumulo.compile.backend.build import toolchain

    digest = hashlib.sha256(toolchain().encode())
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()

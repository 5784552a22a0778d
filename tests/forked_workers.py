"""The workers of pytest-xdist are forked from one process that has imported their test modules, and with them
torch, the server's libraries and this package. Else every worker would import them again, and in a fresh clone each
would compile every file: together more than a CPU minute.

The controller starts that process (`prepare`). For each worker xdist starts `worker_door.py` as its Python, which
hands its standard streams over and waits for the worker's end. Where there is nobody to hand them to, it becomes
the Python that xdist meant.
"""

from __future__ import annotations

import atexit
import compileall
import contextlib
import gc
import importlib
import importlib.util
import os
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest

from tests import forked_ranks, thorough, warm
from tests.kernels.cuda import compile_sm90
from tests.spares import end_after

ROOT = Path(__file__).parents[1]
MODULES = ("transformers.models.llama.modeling_llama",)  # the oracle of many tests, imported when first asked
DOOR = Path(__file__).with_name("worker_door.py")
_THOROUGH = "--thorough"  # which modules ask about when they are imported


def prepare(config: pytest.Config) -> None:
    """Called by the controller, before xdist starts its workers."""
    places = config.getoption("tx", None) or []
    if not sys.platform.startswith("linux") or set(places) != {"popen"}:
        return
    folder = Path(tempfile.mkdtemp(prefix="cumulo-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "workers"))
        listener.listen()
        process = subprocess.Popen(
            # The last word is how tests find an engine among a server's children: it is forked from here.
            [
                sys.executable, "-m", "tests.forked_workers", str(listener.fileno()),
                *([_THOROUGH] if config.getoption(_THOROUGH) else []), *config.args, "engine_process",
            ],
            cwd=ROOT, pass_fds=[listener.fileno()], stdin=subprocess.PIPE,
            # Threads of an OpenMP pool do not survive a fork, and who waits for them waits for ever.
            env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(300)

    config.add_cleanup(end)
    door = shlex.join([sys.executable, "-IS", str(DOOR), str(folder / "workers")])
    config.option.tx = [f"popen//python={door}"] * len(places)


# -- the process that forks -----------------------------------------------------------------------------------
def _import_all(wanted: list[str]) -> None:
    # First, since it writes what assertions say into plugins; below into the test modules.
    from _pytest.config import _prepareconfig

    gc.disable()  # it would walk over what is imported again and again, a seventh of the time
    hooks = list(sys.meta_path)
    _prepareconfig(["--capture=no", "-p", "no:cacheprovider"])
    paths = [Path(name.partition("::")[0]).resolve() for name in wanted]
    files = [
        file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]
    for compile_early in (_compile_kernels, lambda: _compile_all(files)):
        if os.fork() == 0:
            with contextlib.suppress(Exception):
                compile_early()
            os._exit(0)
    _fork_compiler()
    # Others' modules first: meanwhile ours are compiled.
    for name in (*MODULES, *warm.PRELOAD, *forked_ranks.MODULES):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    _measure_products()
    for file in files:
        # One that cannot be imported says so to the worker that collects it.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(_module_name(file))
    sys.meta_path[:] = hooks
    with contextlib.suppress(
        ImportError
    ):  # which each worker would do else, where it has tests with examples
        from hypothesis.internal.conjecture.providers import _get_local_constants

        _get_local_constants()
    gc.freeze()
    gc.enable()


def _measure_products() -> None:
    """Every run of the trainer times matrix products first, a third of a second in each of its ranks, but for what
    is known already."""
    import torch

    from cumulo.train.run.meter import _first_measured

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of others there would be none after a fork
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _first_measured(torch.device("cpu"), dtype)
    torch.set_num_threads(threads)


def _module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def _fork_compiler() -> None:
    """The process that compiles for GPUs this machine does not have: before Triton is imported, which plays kernels
    with its interpreter from then on."""
    import torch  # noqa: F401

    address = Path(tempfile.mkdtemp(prefix="cumulo-tests-")) / "sm90"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    if os.fork() == 0:
        with contextlib.suppress(KeyboardInterrupt):
            compile_sm90.serve_workers(listener)
        shutil.rmtree(address.parent, ignore_errors=True)
        os._exit(0)
    listener.close()
    os.environ[compile_sm90.DOOR] = str(address)


def _compile_kernels() -> None:
    """All workers would wait for the CPU's kernels else, where no test has been run yet."""
    from cumulo.kernels.cpu.library import build

    build(announce=False)


def _compile_all(files: list[Path]) -> None:
    """Beside the process that imports torch and the rest, on another core: it finds the package compiled, the test
    modules with what their assertions say, and the constants of the package from which hypothesis draws."""
    if sys.dont_write_bytecode:
        return
    compileall.compile_dir(ROOT / "cumulo", quiet=2)
    from _pytest.assertion import rewrite
    from hypothesis.internal.constants_ast import constants_from_module

    hook = next(hook for hook in sys.meta_path if isinstance(hook, rewrite.AssertionRewritingHook))
    rewrite.exec = lambda code, names: None  # type: ignore[attr-defined]  # compiled and written, not run
    for file in files:
        spec = importlib.util.spec_from_file_location(_module_name(file), file, loader=hook)
        assert spec is not None
        hook.exec_module(importlib.util.module_from_spec(spec))
    for file in sorted((ROOT / "cumulo").rglob("*.py")):
        module = types.ModuleType(_module_name(file))
        module.__file__ = str(file)
        constants_from_module(module)


def _fork_when_asked(listener: socket.socket) -> str | None:
    """Returns in each new worker, with the code it shall run; and None when the controller has ended."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            return None
        door, _ = listener.accept()
        code, streams, _, _ = socket.recv_fds(door, 4096, 3)
        if os.fork() == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            listener.close()
            warm.fork_parent(door)
            door.sendall(b"1")
            door.detach()  # closed when this process ends, which is what the door waits for
            return code.decode()
        door.close()
        for stream in streams:
            os.close(stream)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():  # hypothesis wants no plugin to read constants
        warnings.simplefilter("ignore")
        wanted = sys.argv[2:-1]
        thorough.chosen = _THOROUGH in wanted
        _import_all([name for name in wanted if name != _THOROUGH])
    code = _fork_when_asked(socket.socket(fileno=int(sys.argv[1])))
    if code is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = ["-c"]
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    # Processes that a worker spawns look into its main module, and would run this one.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    end_after(lambda: exec(code, main.__dict__))


if __name__ == "__main__":
    _main()

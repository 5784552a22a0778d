"""Compiling on first use: cached, atomic, visible, and optional."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cumulo.kernels.cpu import library as build_module
from cumulo.kernels.cpu import library as library_module
from cumulo.kernels.cpu.library import (
    BuildFailed,
    NativeLibrary,
    build,
    default_cache_folder,
    library_name,
    native,
)
from cumulo.kernels.cpu.packed_linear import PackedWeight
from tests.kernels.blocks import random_blocks


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles in an instant: what is tested is the cache, not the compiler."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "library.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build_module, "SOURCE_FOLDER", source)
    return source


def test_the_second_build_finds_the_first(
    tiny_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "cache"
    first = build(folder)
    assert "compiling" in capsys.readouterr().err
    stamp = first.stat().st_mtime_ns
    assert build(folder) == first and first.stat().st_mtime_ns == stamp
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.iterdir()] == [first.name]  # no temporary file is left


def test_processes_that_want_the_kernels_at_once_compile_them_once(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, log = tmp_path / "g++", tmp_path / "compiled"
    # It ends when all three have asked for its version, which is before each looks for the library.
    compiler.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then echo asked >> {log}.asked; exit; fi
echo compiled >> {log}
until [ "$(wc -l < {log}.asked)" -ge 3 ]; do sleep 0.01; done
exec {build_module.find_compiler()} "$@"
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build_module, "find_compiler", lambda: str(compiler))
    with ThreadPoolExecutor(3) as threads:  # each has the folder open for itself, as processes have
        built = list(threads.map(lambda _: build(tmp_path / "cache", announce=False), range(3)))
    assert len(set(built)) == 1 and built[0].exists()
    assert log.read_text() == "compiled\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [built[0].name]


def test_a_changed_source_gets_a_library_of_its_own(tiny_source: Path, tmp_path: Path) -> None:
    first = build(tmp_path / "cache")
    (tiny_source / "library.cpp").write_text('extern "C" int answer() { return 43; }\n')
    second = build(tmp_path / "cache")
    assert first != second and first.exists() and second.exists()


def test_the_name_depends_on_compiler_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {library_name("g++ 12"), library_name("g++ 13")}
    monkeypatch.setattr(build_module, "cpu_identity", lambda: "another CPU")
    assert len(names | {library_name("g++ 12")}) == 3


def test_a_source_that_does_not_compile_says_so_and_leaves_nothing(tiny_source: Path, tmp_path: Path) -> None:
    (tiny_source / "library.cpp").write_text("this is not C++\n")
    with pytest.raises(BuildFailed, match="not C"):
        build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(tiny_source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildFailed, match=str(blocked)):
        build(blocked / "cache")


def test_the_cache_follows_the_xdg_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "cumulo" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "cumulo" / "native"


def test_without_a_compiler_everything_still_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "find_compiler", lambda: None)
    library_module.native.cache_clear()
    try:
        assert native() is None
        assert "no C++ compiler found" in capsys.readouterr().err
        packed = PackedWeight.pack(random_blocks(8, 64, 4, 32))
        x = torch.randn(2, 64)
        assert torch.allclose(packed.matmul(x), x @ packed.dequantize().T, atol=1e-5)
    finally:
        library_module.native.cache_clear()


def test_another_version_of_the_structures_is_not_loaded(tiny_source: Path, tmp_path: Path) -> None:
    (tiny_source / "library.cpp").write_text('extern "C" long long cumulo_struct_sizes() { return 1; }\n')
    with pytest.raises(BuildFailed, match="another version"):
        NativeLibrary(build(tmp_path / "cache", announce=False))


def test_the_kernels_run_on_torch_s_threads() -> None:
    library = native()
    assert library is not None, "the test machine has a compiler"
    assert library.shares_torch_threads

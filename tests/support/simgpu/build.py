"""Builds the simulated device with the host's compiler, once for each version of it and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import torch

HERE: Final = Path(__file__).parent
TORCH: Final = Path(torch.__file__).parent
SOURCES: Final = ("simgpu.cpp", "kernels.h", "guard.h", "memory.h", "streams.h")
OPTIONS: Final = ("-O1", "-g0", "-std=c++20", "-fPIC", "-shared")
LIMIT_S: Final = 900  # on a machine that does much else
SAID: Final = 2000  # characters of the compiler's


class NoCompilerError(Exception):
    """The device cannot be built here; says why."""


def library() -> Path:
    """The device's library, built if it is not in the user's cache folder yet.

    Raises:
        NoCompilerError: if this host has no C++ compiler, or torch came without its headers.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompilerError("no C++ compiler; g++ or $CXX builds the simulated device")
    if not (TORCH / "include" / "ATen").is_dir():
        raise NoCompilerError("torch came without its C++ headers")
    kept = _cache()
    kept.mkdir(parents=True, exist_ok=True)
    built = kept / f"simgpu-{_fingerprint(compiler)}.so"
    if built.exists():
        return built
    with (kept / "simgpu.lock").open("w") as lock:  # several processes run tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(compiler, built)
    return built


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ones-tests"


def _fingerprint(compiler: str) -> str:
    whole = hashlib.sha256(f"{torch.__version__} {TORCH} {compiler} {OPTIONS}".encode())
    for name in SOURCES:
        whole.update((HERE / name).read_bytes())
    return whole.hexdigest()[:20]


def _compile(compiler: str, built: Path) -> None:
    unfinished = built.with_suffix(".unfinished")
    command = [
        compiler, *OPTIONS, f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(HERE / "simgpu.cpp"), "-o", str(unfinished),
        f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{TORCH}/lib",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[:SAID]}")
    unfinished.rename(built)

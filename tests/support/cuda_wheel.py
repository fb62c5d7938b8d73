"""What the library uses of the CUDA build of torch, held against that build; no GPU needed.

`bin/check-cuda` runs it in an environment of its own. What is used is read out of the source of
`elastic/collectives/nccl.py`, so nothing that is added there is forgotten here.
"""

from __future__ import annotations

import ast
import inspect
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "elastic" / "collectives" / "nccl.py"
# How nccl.py calls torch's objects, and which object that is.
OBJECTS: Final = {
    "dist": "torch.distributed", "torch": "torch", "self._make": "ProcessGroupNCCL",
    "group": "ProcessGroupNCCL", "self._group": "ProcessGroupNCCL",
    "self._connected()": "ProcessGroupNCCL", "options": "options", "work": "Work",
    "self._work": "Work",
}  # fmt: skip
# What each of them has to take and give, as pybind writes it.
SIGNATURES: Final = {
    "ProcessGroupNCCL.__init__": "(self, store: Store, rank: int, size: int, options: Options) -> None",
    "ProcessGroupNCCL.allreduce": "(self, tensors: Sequence[Tensor], opts: AllreduceOptions = ...) -> Work",
    "ProcessGroupNCCL.broadcast": "(self, tensors: Sequence[Tensor], opts: BroadcastOptions = ...) -> Work",
    "ProcessGroupNCCL.eager_connect_single_device": "(self, arg0: device) -> None",
    "ProcessGroupNCCL._is_initialized": "(self) -> bool",
    "ProcessGroupNCCL.abort": "(self) -> None",
    "Work.is_completed": "(self) -> bool",
    "Work.exception": "(self) -> object",
    "Work.wait": "(self, timeout: timedelta = ...) -> bool",
}
# torch's own libraries load the driver's; what counts is whether anybody calls it.
DRIVER_STUB: Final = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
static int called(void) {
  int file = open(getenv("DRIVER_CALLED"), O_CREAT | O_WRONLY, 0600);
  if (file >= 0) close(file);
  return 100; /* CUDA_ERROR_NO_DEVICE */
}
int cuInit(unsigned int flags) { return called(); }
int cuDriverGetVersion(int *version) { return called(); }
int cuGetProcAddress(void) { return called(); }
int cuGetProcAddress_v2(void) { return called(); }
int cuDeviceGetCount(int *count) { return called(); }
"""
ZYGOTE: Final = """
import os, sys, torch
driver = lambda: os.path.exists(os.environ["DRIVER_CALLED"])
calls = []
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    def counted(*given, name=name, real=getattr(torch._C, name)):
        calls.append(name)
        return real(*given)
    setattr(torch._C, name, counted)
import elastic.worker.zygote
threads = len(os.listdir("/proc/self/task"))
before = [driver(), calls[:], torch.cuda.is_initialized(), threads]
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-5a"
torch.cuda.device_count(), torch.cuda.is_available()
print(before, [driver(), bool(calls)])
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str


def names_used(source: str) -> list[tuple[str, str]]:
    """What `source` uses of torch's objects: (object, name on it), sorted.

    Args:
        source: of a Python module that calls torch's objects as in `OBJECTS`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        base, _, rest = _split(ast.unparse(node))
        if base and rest:
            found.add((OBJECTS[base], rest))
    inner = {(kind, name.rpartition(".")[0]) for kind, name in found}
    return sorted(found - inner)  # of a.b.c only the whole


def _split(text: str) -> tuple[str, str, str]:
    for base in sorted(OBJECTS, key=len, reverse=True):
        if text.startswith(f"{base}.") and "(" not in text[len(base) :]:
            return base, ".", text[len(base) + 1 :]
    return "", "", ""


def plain(signature: str) -> str:
    """A signature of pybind without the paths of its types and the values of its defaults.

    Args:
        signature: one line of a function's documentation, from its `(` on.
    """
    for long, short in (
        ("typing.SupportsInt | typing.SupportsIndex", "int"),
        ("torch._C._distributed_c10d.", ""),
        ("c10d::ProcessGroupNCCL::", ""),
        ("c10d::", ""),
        ("collections.abc.", ""),
        ("datetime.", ""),
        ("torch.", ""),
    ):
        signature = signature.replace(long, short)
    head, _, rest = signature.partition("self: ")
    return head + "self" + rest[len(rest.split(",")[0].split(")")[0]) :]


def _without_defaults(signature: str) -> str:
    return re.sub(r" = (<[^>]*>|timedelta\([^)]*\)|[^,)]+)", " = ...", signature)


def signatures_of(function: Any) -> list[str]:
    """All overloads that pybind documents.

    Args:
        function: a method that pybind made.
    """
    name = function.__name__
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    found = [line.partition(f"{name}(") for line in lines if f"{name}(self" in line]
    return [_without_defaults(plain(f"({rest}")) for _, _, rest in found]


def check_names() -> Iterator[Result]:
    """Every name that nccl.py uses is there, and every call fits a signature."""
    import torch  # noqa: PLC0415 - the build that is checked
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import Work  # noqa: PLC0415

    nccl = dist.ProcessGroupNCCL
    holders: dict[str, list[Any]] = {
        "torch": [torch],
        "torch.distributed": [dist],
        "ProcessGroupNCCL": [nccl],
        "Work": [Work],
        "options": [nccl.Options(), dist.BroadcastOptions()],
    }
    for kind, name in names_used(SOURCE.read_text("utf-8")):
        there = any(_has(holder, name) for holder in holders[kind])
        yield Result(f"{kind}.{name}", there, "there" if there else "MISSING")
    for name, wanted in SIGNATURES.items():
        holder, _, method = name.partition(".")
        found = signatures_of(getattr(holders[holder][0], method))
        yield Result(f"{name}{wanted}", wanted in found, "fits" if wanted in found else str(found))


def _has(holder: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def check_behaviour() -> Iterator[Result]:
    """What can be seen of options and errors without a GPU."""
    from datetime import timedelta  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import HashStore, PrefixStore  # noqa: PLC0415

    from elastic.collectives.backend_protocol import RendezvousInfo  # noqa: PLC0415
    from elastic.collectives.backends import backend_for, slot_device  # noqa: PLC0415

    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=1800)
    kept = (options.config.blocking, options._timeout)
    yield Result("options keep what is set", kept == (0, timedelta(seconds=1800)), str(kept))
    errors = dist.DistBackendError.__mro__
    yield Result("DistBackendError is a RuntimeError", RuntimeError in errors, str(errors[1]))
    same = torch.device("cuda") == torch.device("cuda:0")
    yield Result("cuda is not cuda:0", not same, str(same))
    yield Result("no GPU: a worker trains on", slot_device().type == "cpu", str(slot_device()))
    store = PrefixStore("check", HashStore())
    backend = backend_for(RendezvousInfo(store, 0, 1, "127.0.0.1", torch.device("cuda", 0)))
    said: Exception | None = None
    try:
        backend.connect()
    except Exception as error:  # noqa: BLE001 - which one is the question
        said = error
    fits = isinstance(said, (RuntimeError, ValueError))
    yield Result("no GPU: connect() says so", fits, f"{type(said).__name__}: {str(said)[:80]}")


def check_variables() -> Iterator[Result]:
    """Every variable that a group relies on is still read by torch or NCCL."""
    import torch  # noqa: PLC0415

    from elastic.collectives.nccl import DEFAULT_VARIABLES, INTERFACE_VARIABLE, REQUIRED_VARIABLES  # noqa: PLC0415

    home = Path(torch.__file__).parent
    libraries = [
        *(home / "lib").glob("libtorch_cuda.so"),
        *home.parent.glob("nvidia/**/libnccl.so.2"),
    ]
    for name in (*REQUIRED_VARIABLES, *DEFAULT_VARIABLES, INTERFACE_VARIABLE):
        readers = [path.name for path in libraries if _holds(path, name.encode() + b"\0")]
        yield Result(f"{name} is read by", bool(readers), " and ".join(readers) or "NOBODY")


def _holds(path: Path, word: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(word) >= 0


def check_zygote() -> Iterator[Result]:
    """Importing the zygote neither calls CUDA nor the driver; asking for a GPU, later, does."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "")
    if not compiler:
        yield Result(
            "the zygote calls no CUDA", ok=False, found="no C compiler for the driver's stub"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        build = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(build, input=DRIVER_STUB, text=True, check=True)
        marks = {
            "LD_LIBRARY_PATH": folder,
            "DRIVER_CALLED": str(Path(folder, "called")),
            "OPENBLAS_NUM_THREADS": "1",  # as the agent starts it
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ZYGOTE],
            env={**os.environ, **marks, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    said = done.stdout.strip() or done.stderr.strip()[-300:]
    wanted = "[False, [], False, 1] [True, True]"
    name = "zygote [driver called, CUDA calls, initialised, threads], then [driver, CUDA] called"
    yield Result(name, said == wanted, said)


CHECKS: Final[tuple[Callable[[], Iterator[Result]], ...]] = (
    check_names,
    check_behaviour,
    check_variables,
    check_zygote,
)


def main() -> int:
    """Say each result; 1 if something does not fit, 2 for a torch without CUDA."""
    import torch  # noqa: PLC0415

    if torch.version.cuda is None:
        sys.stderr.write(f"torch {torch.__version__} has no CUDA in it\n")
        return 2
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [f"{today}: torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {version}"]
    results = [result for check in CHECKS for result in check()]
    lines += [f"{'ok  ' if one.ok else 'FAIL'} {one.name}: {one.found}" for one in results]
    failed = sum(not result.ok for result in results)
    lines.append(f"{len(results)} looked at, {failed} do not fit")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

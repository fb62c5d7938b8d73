"""The check of torch's CUDA build covers all that the library uses of it."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Work

from tests.support.cuda_wheel import SIGNATURES, SOURCE, names_used, signatures_of

METHODS_OF = ("ProcessGroupNCCL", "Work")


def test_each_called_method_has_a_checked_signature() -> None:
    used = names_used(SOURCE.read_text("utf-8"))
    called = {f"{kind}.{name}" for kind, name in used if kind in METHODS_OF and name[0].islower()}
    private = {f"{kind}.{name}" for kind, name in used if kind in METHODS_OF and name[0] == "_"}

    assert called | private | {"ProcessGroupNCCL.__init__"} == SIGNATURES.keys()


def test_the_cpu_build_has_the_same_work_signature() -> None:
    assert SIGNATURES["Work.wait"] in signatures_of(Work.wait)
    assert torch.device("cuda") != torch.device("cuda:0")

"""Options of `submit` and `run` that state when a job starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter
from msgspec.structs import replace

from controlplane.client.job_file import checked
from controlplane.client.sbatch import memory_bytes
from schemas.errors import BadFieldError
from schemas.jobs import JobSpec


def pairs_of(assignments: Sequence[str], option: str = "label") -> dict[str, str]:
    """Return the pairs in the KEY=VALUE texts of an option."""
    pairs = [text.partition("=") for text in assignments]
    for name, sign, _ in pairs:
        if not sign:
            raise BadFieldError(f"{option}: {name[:60]!r} has no =", "write KEY=VALUE", option)
    return {name: value for name, _, value in pairs}


@Parameter(name="*")
@dataclass(frozen=True)
class JobOptions:
    """Fields of a job file that these commands also take as options."""

    after: Annotated[
        str | None, Parameter(help="jobs to wait for: ok:JOB,any:JOB,failed:JOB; JOB is ok:JOB")
    ] = None
    label: Annotated[
        list[str] | None,
        Parameter(name=["--label", "-l"], help="KEY=VALUE, by which `ps` finds it", negative=""),
    ] = None
    array: Annotated[
        str | None, Parameter(help="one job for each index: 0-9, or 0-9%3 for at most 3 at a time")
    ] = None
    class_: Annotated[
        str | None, Parameter(name="--class", help="priority class; `ones quota` lists them")
    ] = None
    not_before: Annotated[
        str | None, Parameter(help="earliest start: 2026-12-01T08:00Z, or +2h (s, m, h or d)")
    ] = None
    deadline: Annotated[
        str | None, Parameter(help="latest end: 2026-12-01T08:00Z, or +2h after the submission")
    ] = None
    gpu_type: Annotated[
        str | None, Parameter(help="type of its GPUs, as in `ones node list`: a100")
    ] = None
    cpus: Annotated[
        float | None, Parameter(help="cores for each slot, or for a job without slots")
    ] = None
    memory: Annotated[
        str | None, Parameter(help="memory for each slot, or for a job without slots: 16G")
    ] = None
    constraint: Annotated[
        list[str] | None, Parameter(help="KEY=VALUE, a label of its nodes", negative="")
    ] = None
    exclusive: Annotated[bool | None, Parameter(help="no other job on its nodes", negative="")] = (
        None
    )

    secret_env: Annotated[
        Path | None, Parameter(help="file of secret variables, NAME=VALUE on each line, mode 600")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return the stated fields of a job file."""
        after = None if self.after is None else tuple(self.after.split(","))
        stated: dict[str, Any] = {
            "after": after,
            "array": self.array,
            "not_before": self.not_before,
            "deadline": self.deadline,
            "class": self.class_,
            "secret_env": None if self.secret_env is None else str(self.secret_env.absolute()),
            "gpu_type": self.gpu_type,
            "cpus": self.cpus,
            "memory_bytes": None if self.memory is None else memory_bytes(self.memory),
            "exclusive": self.exclusive,
        }
        if self.constraint:
            stated["constraints"] = pairs_of(self.constraint, "constraint")
        if self.label:
            stated["labels"] = pairs_of(self.label)
        return {field: value for field, value in stated.items() if value is not None}

    def applied(self, spec: JobSpec) -> JobSpec:
        """Return a checked job file with the stated fields."""
        fields = self.fields()
        if self.label:
            fields["labels"] = spec.stated_labels | fields["labels"]
        if "class" in fields:
            fields["job_class"] = fields.pop("class")
        return checked(replace(spec, **fields), Path.cwd()) if fields else spec


NO_OPTIONS: Final = JobOptions()

"""sweep sample: configurations that Optuna suggests, added as others end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common, JobName
from controlplane.cli.exit_codes import Exit
from controlplane.cli.output import print_json, print_line
from controlplane.client import BlockingClient
from controlplane.client.sweeps.sampler import SamplerName
from controlplane.client.sweeps.sweep import short
from schemas.errors import BadFieldError
from schemas.sweeps import MAX_CONFIGURATIONS, Value

PARALLEL_HELP = "that may train or wait for a slot at once; default: one more than the most slots"


def sample(
    job: JobName,
    /,
    *,
    trials: Annotated[int, Parameter(help="that the sweep shall have, those that it has too")],
    sampler: Annotated[SamplerName, Parameter(help="of Optuna; gp needs torch")] = "tpe",
    parallel: Annotated[int | None, Parameter(help=PARALLEL_HELP)] = None,
    common: Common = COMMON,
) -> int:
    """Add configurations to sweep JOB that Optuna suggests from its results, as others end."""
    for name, number in (("trials", trials), ("parallel", parallel)):
        if number is not None and not 1 <= number <= MAX_CONFIGURATIONS:
            what = f"--{name} {number} is outside 1 to {MAX_CONFIGURATIONS}"
            raise BadFieldError(what, "choose one inside", name)

    def say(number: int, values: Mapping[str, Value]) -> None:
        if common.output == "jsonl":
            print_line({"job": job, "trial": number, "values": values})
        elif common.output == "quiet":
            sys.stdout.write(f"{number}\n")
        elif common.output == "table":
            said = ", ".join(f"{name} {short(value)}" for name, value in values.items())
            sys.stdout.write(f"{job} trial {number}: {said}\n")
        sys.stdout.flush()

    with BlockingClient(common.home) as client:
        many = client.sweep_run(job).sample(trials, sampler, parallel, say)
    if common.output == "json":
        print_json({"job": job, "trials": many})
    if many < trials:
        sys.stderr.write(f"ones: {job} was over with {many} configurations\n")
        return Exit.JOB_FAILED
    return Exit.OK

"""Batch scripts of Slurm, read as `command` jobs.

Options are read from the #SBATCH lines up to the first command, as sbatch does. Options whose
meaning cannot be kept are refused, and those without effect here are named, all at once. The script
runs under bash with the usual SLURM variables, and `srun` starts its tasks on the job's node.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from schemas.errors import BadFieldError

BASH: Final = "/bin/bash"
MARK: Final = "#SBATCH"
WITHOUT_EFFECT: Final = (  # options that are named and otherwise ignored
    "-A", "--account", "-o", "--output", "-e", "--error", "--open-mode", "--mail-type",
    "--mail-user", "-p", "--partition", "--hint", "--distribution",
)  # fmt: skip
FLAGS_WITHOUT_EFFECT: Final = ("-v", "--verbose", "--parsable", "-Q", "--quiet", "--get-user-env")
CONDITIONS: Final = {"afterok": "ok", "afterany": "any", "afternotok": "failed"}
TIME: Final = re.compile(
    r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?"
)  # D-HH:MM:SS, HH:MM:SS, MM:SS or MM
TYPE: Final = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*")
FEATURE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")
MEMORY: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
PRELUDE: Final = r"""
export SLURM_JOB_ID="${ONES_JOB##*-}" SLURM_JOBID="${ONES_JOB##*-}" SLURM_SUBMIT_DIR="$PWD"
srun() {
  local tasks="$SLURM_NTASKS" code=0 rank pids=()
  while [[ "$1" == -* ]]; do
    case "$1" in
      -n) tasks="$2"; shift ;;
      --ntasks=*) tasks="${1#*=}" ;;
      -[A-Za-z]) [[ "$2" == -* ]] || shift ;;
    esac
    shift
  done
  for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=$tasks "$@" & pids+=($!)
  done
  for rank in "${pids[@]}"; do wait "$rank" || code=$?; done
  return $code
}
export -f srun
exec bash "$0" "$@"
"""


def is_batch_script(data: bytes) -> bool:
    """True if a file has an #SBATCH line at its head."""
    return bool(re.search(rb"^#SBATCH\s", data, re.MULTILINE))


def command_line(argv: Sequence[str]) -> str:
    """Return the command of a job in one line; that of a batch script without what was added."""
    return f"sbatch {shlex.join(argv[3:])}" if PRELUDE in argv else shlex.join(argv)


def job_of_batch_script(text: str, script: str) -> tuple[dict[str, Any], str]:
    """Return the fields of the job that a batch script describes, and a remark for its user.

    Args:
        text: content of the script.
        script: its path, relative to the folder from which it is submitted.

    Raises:
        BadFieldError: if an option is unknown, invalid, or needs more than one node.
    """
    given = _parsed(_options(text))
    nodes = given.nodes or 1
    if nodes > 1:
        what = f"sbatch: --nodes={nodes}: a batch script runs on one node"
        remedy = 'several nodes: kind = "torchrun", as in `ones run -- torchrun ...`'
        raise BadFieldError(what, remedy, "slots")
    tasks = given.ntasks or given.ntasks_per_node or 1
    gpu_type, gpus = given.gpus or given.gpus_per_node or given.gres or ("", None)
    if gpus is None and given.gpus_per_task is not None:
        gpu_type, gpus = given.gpus_per_task[0], given.gpus_per_task[1] * tasks
    slots = max(1, gpus if gpus is not None else tasks)
    fields: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9_-]+", "-", given.job_name or _stem(script)).strip("-_")[:48],
        "kind": "command",
        "command": [BASH, "-c", PRELUDE, script],
        "slots": slots,
        "env": {
            "SLURM_JOB_NAME": given.job_name or _stem(script),
            "SLURM_NTASKS": str(tasks),
            "SLURM_NNODES": "1",
            "SLURM_JOB_NUM_NODES": "1",
            **given.export,
        },
    }
    fields |= _requests(given, gpu_type, tasks, slots)
    if given.time is not None:
        fields["max_run_s"] = given.time
    if given.chdir is not None:
        fields["workdir"] = given.chdir
    if given.array is not None:
        fields["array"] = given.array
    if given.begin is not None:
        fields["not_before"] = given.begin
    if given.deadline is not None:
        fields["deadline"] = given.deadline
    if given.signal is not None:
        fields["warn"] = given.signal
    if given.dependency is not None:
        fields["after"] = given.dependency
    if given.qos is not None:
        fields["class"] = given.qos
    if given.comment is not None:
        fields["labels"] = {"comment": given.comment}
    if given.requeue is not None:
        fields["on_loss"] = "restart" if given.requeue else "fail"
    named = [name for name in given.ignored if name]
    remark = f"{', '.join(named)}: no effect here" if named else ""
    return fields, remark


def _requests(given: argparse.Namespace, gpu_type: str, tasks: int, slots: int) -> dict[str, Any]:
    """Return the requests for each slot. Totals of tasks and of the node are divided."""
    cpus = given.cpus_per_gpu
    if cpus is None and given.cpus_per_task is not None:
        cpus = given.cpus_per_task * tasks / slots
    memory = given.mem_per_gpu
    if memory is None and given.mem_per_cpu is not None:
        memory = given.mem_per_cpu * (cpus if cpus is not None else tasks / slots)
    if memory is None and given.mem is not None:
        memory = given.mem / slots
    stated = {"gpu_type": gpu_type or None, "cpus": None if cpus is None else float(cpus)}
    stated |= {"memory_bytes": int(memory) if memory else None}  # 0: all memory of the node
    stated |= {"exclusive": given.exclusive, "constraints": given.constraint}
    return {field: value for field, value in stated.items() if value is not None}


def _options(text: str) -> list[str]:
    """Return the words of the #SBATCH lines before the first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith(MARK):
            words += shlex.split(line.removeprefix(MARK), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        remedy = "correct the #SBATCH line; docs/from-slurm.md lists the options"
        raise BadFieldError(f"sbatch: {message}", remedy, "script")


class _Ignored(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.ignored = [*namespace.ignored, option]


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    parser.set_defaults(ignored=[], requeue=None)
    parser.add_argument("-J", "--job-name")
    parser.add_argument("-D", "--chdir")
    parser.add_argument("-t", "--time", type=_seconds)
    parser.add_argument("-N", "--nodes", type=_count)
    parser.add_argument("-n", "--ntasks", type=_count)
    parser.add_argument("--ntasks-per-node", type=_count)
    for name in ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gres"):
        parser.add_argument(*(("-G", name) if name == "--gpus" else (name,)), type=_gpus)
    parser.add_argument("-c", "--cpus-per-task", type=_count)
    parser.add_argument("--cpus-per-gpu", type=_count)
    for name in ("--mem", "--mem-per-cpu", "--mem-per-gpu"):
        parser.add_argument(name, type=_megabytes)
    parser.add_argument("--exclusive", action="store_true", default=None)
    parser.add_argument("-C", "--constraint", type=_features)
    parser.add_argument("--export", type=_variables, default={})
    parser.add_argument("-a", "--array")
    parser.add_argument("-b", "--begin", type=_begin)
    parser.add_argument("--deadline", type=_begin)
    parser.add_argument("--signal", type=_warning)
    parser.add_argument("-d", "--dependency", type=_parents)
    parser.add_argument("--comment")
    parser.add_argument("-q", "--qos")
    parser.add_argument("--requeue", action="store_true", default=None)
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    for name in WITHOUT_EFFECT:
        parser.add_argument(name, action=_Ignored)
    for name in FLAGS_WITHOUT_EFFECT:
        parser.add_argument(name, action=_Ignored, nargs=0)
    given, unknown = parser.parse_known_args(list(words))
    if unknown:
        names = ", ".join(word.partition("=")[0] for word in unknown if word.startswith("-"))
        parser.error(f"options without a counterpart: {names or ' '.join(unknown)}")
    return given


def _stem(script: str) -> str:
    return script.rpartition("/")[2].rpartition(".")[0] or script.rpartition("/")[2]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _gpus(text: str) -> tuple[str, int]:
    """Return type and number of [gpu:][TYPE:]NUMBER; the type may be empty."""
    words = text.removeprefix("gpu:").split(":") if text != "gpu" else ["1"]
    number = words.pop() if words[-1].isdecimal() else "1"
    if len(words) > 1 or not all(map(TYPE.fullmatch, words)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return (words[0] if words else ""), int(number)


def memory_bytes(text: str, unit: str = "") -> int:
    """Return the bytes of a text such as 16G or 512M; a number alone counts `unit`.

    Raises:
        BadFieldError: if the text is not an amount of memory.
    """
    found = MEMORY.fullmatch(text)
    if found is None:
        what = f"memory: {text[:40]!r} is not an amount of memory"
        raise BadFieldError(what, "write 16G, 512M or a number of bytes", "memory")
    return int(float(found[1]) * UNITS.get(found[2].upper() or unit, 1))


def _megabytes(text: str) -> int:
    try:
        return memory_bytes(text, "M")
    except BadFieldError:
        raise argparse.ArgumentTypeError(f"{text!r} is not memory, such as 16G") from None


def _features(text: str) -> dict[str, str]:
    """Return the labels that nodes must have: a&b means a = yes and b = yes."""
    parts = [part.partition("=") for part in text.split("&")]
    if not all(FEATURE.fullmatch(name) for name, _, _ in parts):
        raise argparse.ArgumentTypeError(f"{text!r} has more than names of labels joined by &")
    return {name: value or "yes" for name, _, value in parts}


def _seconds(text: str) -> float:
    """Return the seconds of a time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    found = TIME.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 30, 2:00:00 or 1-12")
    first, second, third = (int(found[part] or 0) for part in "abc")
    if found["d"] is not None:
        return float(int(found["d"]) * 86_400 + first * 3600 + second * 60 + third)
    if found["b"] is None:
        return first * 60.0
    if found["c"] is None:
        return first * 60.0 + second
    return first * 3600.0 + second * 60.0 + third


def _begin(text: str) -> str:
    """Return an earliest start: now+2hours and the like become delays, times stay as they are."""
    found = re.fullmatch(r"now\+(\d+)(seconds?|minutes?|hours?|days?)?", text)
    return text if found is None else f"+{found[1]}{(found[2] or 's')[0]}"


def _warning(text: str) -> dict[str, Any]:
    """Return the warning before the end: [B:]SIGNAL[@SECONDS]. B is for the script alone."""
    found = re.fullmatch(r"(B:)?(?:SIG)?(USR1|USR2|HUP|INT|TERM)(?:@(\d+))?", text)
    if found is None:
        forms = "[B:]NAME@SECONDS, with USR1, USR2, HUP, INT or TERM"
        raise argparse.ArgumentTypeError(f"{text!r} is not {forms}")
    to = "first" if found[1] else "others"
    return {"signal": found[2], "before_s": float(found[3] or 60), "to": to}


def _parents(text: str) -> list[str]:
    """Return the jobs to wait for: afterok:NAME:NAME,afterany:NAME."""
    found = []
    for part in text.split(","):
        kind, *names = part.split(":")
        if kind not in CONDITIONS or not names or "?" in text:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not afterok, afterany or afternotok with names of jobs"
            )
        found += [f"{CONDITIONS[kind]}:{name}" for name in names]
    return found


def _variables(text: str) -> dict[str, str]:
    words = [word for word in text.split(",") if word not in {"ALL", "NONE", "NIL", ""}]
    plain = [word for word in words if "=" not in word]
    if plain:
        what = f"{', '.join(plain)}: variables of your shell do not travel; write NAME=VALUE"
        raise argparse.ArgumentTypeError(what)
    return dict(word.split("=", 1) for word in words)

"""Scripts that use a training framework: edits for our adapter, and options that it refuses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from controlplane.cli.init_script.syntax import (
    Edit,
    Numbers,
    Source,
    called,
    dotted,
    keyword,
    last_name,
    literal,
)

WHOLE: Final = "an epoch has every sample once"
REDUCES: Final = "the agent's group reduces gradients"
RESUMES: Final = "a job resumes from its own checkpoints"
SHUFFLES: Final = "samples are shuffled by the job's seed"
REFUSED: Final[Mapping[str, Mapping[str, str]]] = {  # options, with the reason to leave them out
    "TrainingArguments": {
        "auto_find_batch_size": "max_local_batch of the job file bounds a share",
        "deepspeed": REDUCES,
        "fsdp": REDUCES,
        "group_by_length": SHUFFLES,
        "train_sampling_strategy": SHUFFLES,
        "include_num_input_tokens_seen": "a worker sees the tokens of its own share",
    },
    "train": {"resume_from_checkpoint": RESUMES},
    "Trainer": {
        "limit_train_batches": WHOLE,
        "overfit_batches": WHOLE,
        "fast_dev_run": WHOLE,
        "reload_dataloaders_every_n_epochs": "the job's loader lives as long as the job",
        "val_check_interval": "the number of steps in an epoch changes with the batch",
    },
    "fit": {"ckpt_path": RESUMES},
    "Accelerator": dict.fromkeys(
        ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"), REDUCES
    ),
}
REFUSED_CALLS: Final = {
    "save_state": RESUMES,
    "load_state": RESUMES,
    "skip_first_batches": RESUMES,
    "check_trigger": "call `accelerator.stop(why)` instead",
}
FORMER: Final = "pytorch_lightning"


@dataclass(frozen=True)
class Framework:
    """A framework whose trainer or accelerator a script uses."""

    name: str  # transformers, lightning or accelerate
    calls: tuple[ast.Call, ...]  # of its trainer, or its accelerator
    classes: tuple[tuple[ast.ClassDef, ast.expr], ...]  # derived from its trainer, with the base
    names: Mapping[str, str]  # imported names, with module

    def full(self, node: ast.AST) -> str:
        """Return an imported name with its module; empty for any other."""
        first, dot, rest = dotted(node).partition(".")
        return f"{self.names[first]}{dot}{rest}" if first in self.names else ""


class FrameworkNumbers(NamedTuple):
    """Numbers in the options of a framework; None if only a run can tell."""

    batch_size: int | None
    lr: float | None
    epochs: int | None
    steps: int | None = None  # of the whole training, instead of epochs


class AdapterEdits(NamedTuple):
    """Edits that make a script use our adapter, and what is left to do by hand."""

    edits: list[Edit]
    imports: str  # a line for the head of the script
    problems: list[str]


def framework_of(tree: ast.Module) -> Framework | None:
    """Return the framework that a script uses; None if it has its own loop."""
    names = _imported(tree)
    for name, roots, maker in (
        ("transformers", {"transformers", "trl"}, "Trainer"),
        ("lightning", {"lightning", FORMER}, "Trainer"),
        ("accelerate", {"accelerate"}, "Accelerator"),
    ):
        found = Framework(name, (), (), names)
        calls, classes = [], []
        for node in ast.walk(tree):
            makers = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
            for one in makers:
                full = found.full(one)
                if full.split(".")[0] in roots and full.endswith(maker):
                    if isinstance(node, ast.Call):
                        calls.append(node)
                    elif isinstance(node, ast.ClassDef):
                        classes.append((node, one))
        if calls or classes:
            return Framework(name, tuple(calls), tuple(classes), names)
    return None


def _imported(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                found[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


# --- numbers in its options


def framework_numbers(
    framework: Framework, tree: ast.Module, numbers: Numbers, batch: int | None, lr: float | None
) -> FrameworkNumbers:
    """Read batch, rate and length of the training from the framework's options.

    `batch` and `lr` are those of the script's own loader and optimizer, if any.
    """
    if framework.name == "transformers":
        made = [n for n in ast.walk(tree) if last_name(n).endswith("TrainingArguments")]
        options = _Options(made[0] if made else None, numbers)
        size = options.number("per_device_train_batch_size", 8)
        passes = options.number("gradient_accumulation_steps", 1)
        lr = options.number("learning_rate", 5e-5)
        epochs, steps = options.number("num_train_epochs", 3), options.number("max_steps", -1)
        batch = int(size * passes) if size and passes else None
        return _length(batch, lr, epochs, steps)
    options = _Options(framework.calls[0] if framework.calls else None, numbers)
    if framework.name == "lightning":
        passes = options.number("accumulate_grad_batches", 1)
        epochs, steps = options.number("max_epochs", None), options.number("max_steps", -1)
        return _length(int(batch * passes) if batch and passes else None, lr, epochs, steps)
    passes = options.number("gradient_accumulation_steps", 1)
    return FrameworkNumbers(int(batch * passes) if batch and passes else None, lr, None)


class _Options:
    def __init__(self, call: ast.AST | None, numbers: Numbers) -> None:
        self._call = call if isinstance(call, ast.Call) else None
        self._numbers = numbers

    def number(self, name: str, default: float | None) -> float | None:
        """Return an option's number; None if it cannot be read."""
        if self._call is None:
            return None
        if (given := keyword(self._call, name)) is not None:
            return self._numbers.of(given)
        return None if any(k.arg is None for k in self._call.keywords) else default


def _length(
    batch: int | None, lr: float | None, epochs: float | None, steps: float | None
) -> FrameworkNumbers:
    if steps is None or steps > 0:
        return FrameworkNumbers(batch, lr, None, None if steps is None else int(steps))
    whole = epochs is not None and epochs >= 1 and epochs == int(epochs)
    return FrameworkNumbers(batch, lr, int(epochs) if epochs is not None and whole else None)


# --- its adapter


def adapter_edits(
    source: Source, framework: Framework, loop: tuple[ast.Call, str] | None
) -> AdapterEdits:
    """Return the edits that make a script use our adapter.

    `loop` has the call of `range` over epochs and its replacement, if the script has such a loop.
    """
    found = AdapterEdits([], "", [])
    match framework.name:
        case "transformers":
            needed = _trainers(source, framework, found)
        case "lightning":
            needed = _strategies(source, framework, found)
        case _:
            needed = _accelerators(source, framework, loop, found)
    line = f"from elastic.{framework.name} import {', '.join(sorted(needed))}" if needed else ""
    return found._replace(imports=line)


def _trainers(source: Source, framework: Framework, found: AdapterEdits) -> set[str]:
    needed = set()
    for call in framework.calls:
        if framework.full(call.func) in {"transformers.Trainer", "transformers.trainer.Trainer"}:
            found.edits.append(Edit(*source.span(call.func), "ElasticTrainer"))
            needed.add("ElasticTrainer")
        else:
            name = last_name(call)
            found.problems.append(
                f"line {call.lineno}: `{name}(...)` has no adapter: define "
                f"`class Mine(ElasticMixin, {name})` with ElasticMixin of elastic.transformers, "
                "and use Mine instead; docs/frameworks.md shows how"
            )
    for _, base in framework.classes:
        first = source.span(base)[0]
        found.edits.append(Edit(first, first, "ElasticMixin, "))
        needed.add("ElasticMixin")
    found.edits.extend(_without_import(source, framework, "Trainer"))
    return needed


def _strategies(source: Source, framework: Framework, found: AdapterEdits) -> set[str]:
    """Give each trainer the options `strategy=ElasticStrategy(), devices=1`."""
    for call in framework.calls:
        if framework.full(call.func).startswith(FORMER):
            found.problems.append(
                f"line {call.lineno}: {FORMER} has no adapter: import lightning.pytorch instead"
            )
            continue
        missing = {"strategy": "ElasticStrategy()", "devices": "1"}
        for option in call.keywords:
            if option.arg in missing or option.arg == "num_nodes":
                text = missing.pop(option.arg, "1")
                found.edits.append(Edit(*source.span(option.value), text))
        if missing:
            text = ", ".join(f"{name}={value}" for name, value in missing.items())
            if call.keywords:
                at = source.span(call.keywords[0])[0]
                own_line = call.keywords[0].lineno != call.lineno
                text += f",\n{' ' * call.keywords[0].col_offset}" if own_line else ", "
            else:
                at = source.span(call)[1] - 1
            found.edits.append(Edit(at, at, text))
    return {"ElasticStrategy"} if found.edits else set()


def _accelerators(
    source: Source,
    framework: Framework,
    loop: tuple[ast.Call, str] | None,
    found: AdapterEdits,
) -> set[str]:
    if loop is None:
        found.problems.append(
            "no `for epoch in range(...)` around `backward()`: "
            "write `for epoch in accelerator.epochs(N)`"
        )
        return set()
    for call in framework.calls:
        found.edits.append(Edit(*source.span(call.func), "ElasticAccelerator"))
    numbers, count = loop
    name = next(
        (dotted(n.targets[0]) for n in ast.walk(source.tree)
         if isinstance(n, ast.Assign) and n.value in framework.calls),
        "accelerator",
    )  # fmt: skip
    found.edits.append(Edit(*source.span(numbers), count.replace("EPOCHS", f"{name}.epochs")))
    found.edits.extend(_without_import(source, framework, "Accelerator"))
    return {"ElasticAccelerator"}


def _without_import(source: Source, framework: Framework, name: str) -> Iterator[Edit]:
    """Remove the import of a name that nothing else uses."""
    used = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name]
    if framework.classes or len(used) > sum(called(call) == name for call in framework.calls):
        return
    for statement in source.tree.body:
        if not isinstance(statement, ast.ImportFrom) or statement.lineno != statement.end_lineno:
            continue
        left = [alias for alias in statement.names if (alias.asname or alias.name) != name]
        if len(left) < len(statement.names):
            kept = ast.ImportFrom(statement.module, left, statement.level)
            yield Edit(*source.lines(statement), f"{ast.unparse(kept)}\n" if left else "")


# --- what it refuses


def refused_options(framework: Framework, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the options and calls that our adapter refuses, with line and remedy."""
    for node in ast.walk(tree):
        name = last_name(node)
        if not isinstance(node, ast.Call):
            continue
        if name in REFUSED_CALLS and framework.name == "accelerate":
            yield node.lineno, f"`{name}()` is refused, leave it out: {REFUSED_CALLS[name]}"
        if name.endswith("TrainingArguments"):
            name = "TrainingArguments"
        if name == "Trainer" and framework.name != "lightning":
            continue
        for option in node.keywords:
            why = REFUSED.get(name, {}).get(option.arg or "")
            if why and _asks(option.arg or "", literal(option.value)):
                yield option.value.lineno, f"`{option.arg}` is refused, leave it out: {why}"
    if framework.name == "lightning":
        for node in ast.walk(tree):
            manual = isinstance(node, ast.Assign) and dotted(node.targets[0]).endswith(
                "automatic_optimization"
            )
            if manual and isinstance(node, ast.Assign) and literal(node.value) is False:
                problem = "manual optimization is refused: write the loop with ScalingAgent"
                yield node.lineno, problem


def _asks(name: str, value: Any) -> bool:
    """True if the option is set; False for expressions."""
    if isinstance(value, float):
        return value not in {0.0, 1.0}
    if isinstance(value, int) and not isinstance(value, bool):
        return value != 0 and name != "val_check_interval"
    return value not in (None, False, "", "no", "random", [], {})

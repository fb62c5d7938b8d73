"""The edits of scripts that use a training framework or a process group, and refused options."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.cli.init_script.syntax import (
    Edit,
    Numbers,
    Source,
    assigned,
    blocks,
    called,
    dotted,
    keyword,
    last_name,
    literal,
    value_of,
)

WHOLE: Final = "an epoch has every sample once"
REDUCES: Final = "the agent's group reduces gradients"
RESUMES: Final = "a job resumes from its own checkpoints"
SHUFFLES: Final = "samples are shuffled by the job's seed"
REFUSED: Final[Mapping[str, Mapping[str, str]]] = {  # options by call, with the reason to omit them
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
FRAMEWORKS: Final = (
    ("transformers", frozenset({"transformers", "trl"}), "Trainer"),
    ("lightning", frozenset({"lightning", FORMER}), "Trainer"),
    ("accelerate", frozenset({"accelerate"}), "Accelerator"),
)


@dataclass
class Framework:
    """Training framework that a script uses, and where the script uses it."""

    name: str  # transformers, lightning or accelerate
    packages: frozenset[str]
    maker: str  # suffix of the name of the trainer or accelerator
    names: Mapping[str, str]  # imported names, each with its full dotted name
    calls: list[ast.Call] = field(default_factory=list)  # calls that make a trainer or accelerator
    bases: list[ast.expr] = field(default_factory=list)  # the trainer, as a base class

    def full(self, node: ast.AST) -> str:
        """Return an imported name with its module, or "" if the name is not imported."""
        first, dot, rest = dotted(node).partition(".")
        return f"{self.names[first]}{dot}{rest}" if first in self.names else ""

    def made_by(self, node: ast.expr) -> bool:
        """True if a called function or base class is the framework's trainer or accelerator."""
        full = self.full(node)
        return full.split(".")[0] in self.packages and full.endswith(self.maker)


@dataclass
class Rewrite:
    """Edits of a script, problems to solve by hand, and remarks on other lines."""

    edits: list[Edit] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)  # names to import from our adapter
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def framework_of(tree: ast.Module) -> Framework | None:
    """Return the framework that a script uses, or None if the script has its own training loop."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for kind in FRAMEWORKS:
        found = Framework(*kind, names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and found.made_by(node.func):
                found.calls.append(node)
            elif isinstance(node, ast.ClassDef):
                found.bases += filter(found.made_by, node.bases)
        if found.calls or found.bases:
            return found
    return None


# --- numbers in the options of a framework


def framework_numbers(
    framework: Framework, source: Source, numbers: Numbers, batch: int | None, lr: float | None
) -> tuple[int | None, float | None, int | None, int | None]:
    """Return batch size, learning rate, epochs and steps from the options of the framework.

    A number is None if it is only known at run time; either epochs or steps are None. `batch` and
    `lr` come from the script's own loader and optimizer, or are None without these.
    """
    call = next(iter(framework.calls), None)
    if framework.name == "transformers":
        made = (c for c in source.calls if last_name(c).endswith("TrainingArguments"))
        call = next(made, None)

    def option(name: str, default: float | None) -> float | None:
        """Return the number given for an option, else `default`, or None if it cannot be read."""
        if call is None:
            return None
        if (given := keyword(call, name)) is not None:
            return numbers.of(given)
        return None if any(k.arg is None for k in call.keywords) else default

    size: float | None = batch
    passes, epochs = option("gradient_accumulation_steps", 1), option("max_epochs", None)
    if framework.name == "transformers":
        size, lr = option("per_device_train_batch_size", 8), option("learning_rate", 5e-5)
        epochs = option("num_train_epochs", 3)
    elif framework.name == "lightning":
        passes = option("accumulate_grad_batches", 1)
    batch, steps = int(size * passes) if size and passes else None, option("max_steps", -1)
    if framework.name == "accelerate":
        return batch, lr, None, None
    if steps is None or steps > 0:
        return batch, lr, None, None if steps is None else int(steps)
    whole = epochs is not None and epochs >= 1 and epochs == int(epochs)
    return batch, lr, int(epochs) if epochs is not None and whole else None, None


# --- adapters


def adapter_edits(
    source: Source, framework: Framework, loop: tuple[ast.Call, str] | None
) -> Rewrite:
    """Return the edits that make a script use our adapter.

    `loop` has the `range` call of the script's epoch loop and its replacement, if there is a loop.
    """
    found = Rewrite()
    match framework.name:
        case "transformers":
            _replace_trainers(source, framework, found)
        case "lightning":
            _add_strategies(source, framework, found)
        case _:
            _replace_accelerators(source, framework, loop, found)
    return found


def _replace_trainers(source: Source, framework: Framework, found: Rewrite) -> None:
    for call in framework.calls:
        if framework.full(call.func) in {"transformers.Trainer", "transformers.trainer.Trainer"}:
            found.edits.append(source.replace(call.func, "ElasticTrainer"))
            found.needed.add("ElasticTrainer")
        else:
            name = last_name(call)
            found.problems.append(
                f"line {call.lineno}: `{name}(...)` has no adapter: define "
                f"`class Mine(ElasticMixin, {name})` with ElasticMixin of elastic.transformers, "
                "and use Mine instead; docs/frameworks.md shows how"
            )
    for base in framework.bases:
        first = source.span(base)[0]
        found.edits.append(Edit(first, first, "ElasticMixin, "))
        found.needed.add("ElasticMixin")
    found.edits += _without_import(source, framework, "Trainer")


def _add_strategies(source: Source, framework: Framework, found: Rewrite) -> None:
    for call in framework.calls:
        if framework.full(call.func).startswith(FORMER):
            found.problems.append(
                f"line {call.lineno}: {FORMER} has no adapter: import lightning.pytorch instead"
            )
            continue
        missing = {"strategy": "ElasticStrategy()", "devices": "1"}
        for option in call.keywords:
            if option.arg in missing or option.arg == "num_nodes":
                found.edits.append(source.replace(option.value, missing.pop(option.arg, "1")))
        if missing:
            text = ", ".join(f"{name}={value}" for name, value in missing.items())
            at = source.span(call)[1] - 1
            if call.keywords:
                first = call.keywords[0]
                at = source.span(first)[0]
                own_line = first.lineno != call.lineno
                text += f",\n{' ' * first.col_offset}" if own_line else ", "
            found.edits.append(Edit(at, at, text))
    if found.edits:
        found.needed.add("ElasticStrategy")


def _replace_accelerators(
    source: Source, framework: Framework, loop: tuple[ast.Call, str] | None, found: Rewrite
) -> None:
    if loop is None:
        found.problems.append(
            "no `for epoch in range(...)` around `backward()`: "
            "write `for epoch in accelerator.epochs(N)`"
        )
        return
    found.edits += [source.replace(call.func, "ElasticAccelerator") for call in framework.calls]
    found.needed.add("ElasticAccelerator")
    numbers, count = loop
    name = next(
        (dotted(n.targets[0]) for n in ast.walk(source.tree)
         if isinstance(n, ast.Assign) and n.value in framework.calls),
        "accelerator",
    )  # fmt: skip
    found.edits.append(source.replace(numbers, count.replace("EPOCHS", f"{name}.epochs")))
    found.edits += _without_import(source, framework, "Accelerator")


def _without_import(source: Source, framework: Framework, name: str) -> Iterator[Edit]:
    """Yield the edit that removes the import of `name`, unless the script still needs it."""
    used = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name]
    if framework.bases or len(used) > sum(called(call) == name for call in framework.calls):
        return
    for statement in source.tree.body:
        if not isinstance(statement, ast.ImportFrom) or statement.lineno != statement.end_lineno:
            continue
        left = [alias for alias in statement.names if (alias.asname or alias.name) != name]
        if len(left) < len(statement.names):
            kept = ast.ImportFrom(statement.module, left, statement.level)
            yield Edit(*source.lines(statement), f"{ast.unparse(kept)}\n" if left else "")


# --- refused options


def refused_options(framework: Framework, source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line of each option or call that our adapter refuses, with the remedy."""
    for call in source.calls:
        name = last_name(call)
        if name in REFUSED_CALLS and framework.name == "accelerate":
            yield call.lineno, f"`{name}()` is refused, leave it out: {REFUSED_CALLS[name]}"
        if name == "Trainer" and framework.name != "lightning":
            continue
        name = "TrainingArguments" if name.endswith("TrainingArguments") else name
        for option in call.keywords:
            why = REFUSED.get(name, {}).get(option.arg or "")
            if why and _is_set(option.arg, literal(option.value)):
                yield option.value.lineno, f"`{option.arg}` is refused, leave it out: {why}"
    for node in ast.walk(source.tree) if framework.name == "lightning" else ():
        name = dotted(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if name.endswith("automatic_optimization") and literal(value_of(node)) is False:
            problem = "manual optimization is refused: write the loop with ScalingAgent"
            yield getattr(node, "lineno", 0), problem


def _is_set(name: str | None, value: Any) -> bool:
    """True if a literal value makes the option effective; False for other expressions."""
    if isinstance(value, float):
        return value not in {0.0, 1.0}
    if isinstance(value, int) and not isinstance(value, bool):
        return value != 0 and name != "val_check_interval"
    return value not in (None, False, "", "no", "random", [], {})


# --- torch's own process group


GONE: Final = frozenset(
    {"init_process_group", "destroy_process_group", "barrier", "set_device", "set_epoch"}
)
KINDS: Final = {  # name in scripts -> attribute of the agent; "" for the local rank
    "RANK": "rank", "get_rank": "rank", "WORLD_SIZE": "world_size", "get_world_size": "world_size",
    "LOCAL_RANK": "",
}  # fmt: skip


def distributed_edits(source: Source, agent: str, model: str) -> Rewrite | None:
    """Return the edits that remove torch's own process group, or None if the script has none.

    Call this only for a script that can be ported.
    """
    makers = {"init_process_group", "DistributedSampler"}
    if not any(last_name(call) in makers for call in source.calls):
        return None
    found = Rewrite()
    inside: set[ast.AST] = set()  # removed statements, with all their nodes
    for block in blocks(source.tree):
        leaving = [s for s in block if _goes(s)]
        for statement in leaving:
            alone = len(leaving) == len(block) and statement is leaving[0]
            text = f"{' ' * statement.col_offset}pass\n" if alone else ""
            found.edits.append(Edit(*source.lines(statement), text))
            inside.update(ast.walk(statement))
    # A name for rank or size is replaced wherever it is used, because these values change.
    names: dict[str, str] = {}
    for statement in (s for block in blocks(source.tree) for s in block):
        value, name, kind = value_of(statement), assigned(statement), _kind(value_of(statement))
        if kind and name:
            names[name] = f"{agent}.{kind}"
        elif kind == "" and value is not None:
            found.edits.append(source.replace(value, "0"))
            found.advice.append(f"line {statement.lineno}: a worker sees one device, numbered 0")
    for node in ast.walk(source.tree):
        if node not in inside:
            found.edits += _replaced(node, source, names, (agent, model), found.problems)
    return found


def _replaced(
    node: ast.AST, source: Source, names: dict[str, str], own: tuple[str, str], problems: list[str]
) -> Iterator[Edit]:
    """Yield the edits of one name, attribute or call; `own` is the names of agent and model."""
    agent, model = own
    match node:
        case ast.Name() if node.id in names:
            yield source.replace(node, names[node.id])
        case ast.Attribute(attr="module", value=ast.Name() as value) if value.id == model:
            yield source.replace(node, source.of(value))
        case ast.Call() if called(node).startswith(("dist.", "torch.distributed.")):
            if kind := _kind(node):
                yield source.replace(node, f"{agent}.{kind}")
            elif last_name(node) not in {"is_initialized", "is_available"}:
                problems.append(
                    f"line {node.lineno}: {called(node)}() needs torch's own process group, which "
                    "does not exist: remove it; agent.report() takes the numbers of rank 0"
                )


def _goes(statement: ast.stmt) -> bool:
    value = value_of(statement)
    if isinstance(statement, ast.Expr):
        return last_name(value) in GONE
    if isinstance(value, ast.IfExp):
        value = value.body
    return last_name(value) == "DistributedSampler" or bool(_kind(value))


def _kind(value: ast.expr | None) -> str | None:
    """Return the agent attribute that replaces a value: "" for the local rank, None for others."""
    if isinstance(value, ast.Call) and last_name(value) == "int" and value.args:
        value = value.args[0]
    named: object = last_name(value)
    if isinstance(value, ast.Subscript):
        named = value.slice.value if isinstance(value.slice, ast.Constant) else ""
    elif isinstance(value, ast.Call) and named in {"get", "getenv"} and value.args:
        named = value.args[0].value if isinstance(value.args[0], ast.Constant) else ""
    return KINDS.get(str(named))

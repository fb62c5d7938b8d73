"""Parts of a training script: model, optimizer, loader, epoch loop and numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from controlplane.cli.init_script.frameworks import Framework, framework_numbers, framework_of
from controlplane.cli.init_script.syntax import (
    Block,
    Numbers,
    Source,
    assigned,
    blocks,
    called,
    calls_any,
    constants,
    keyword,
    last_name,
    loads,
    options,
    stores,
    value_of,
)

OPTIMIZERS: Final = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "Adadelta",
     "Adafactor", "RMSprop", "Rprop", "ASGD", "Muon"}
)  # fmt: skip
LOOKS_LIKE_METRIC: Final = re.compile(r"acc|accuracy|val_|valid|f1|bleu|perplexity|ppl|auc|error")


class Made(NamedTuple):
    """Statement that assigns a value to a name."""

    name: str
    statement: ast.stmt
    value: ast.expr
    block: Block


class EpochLoop(NamedTuple):
    """Loop over epochs."""

    statement: ast.For
    numbers: ast.Call  # the call of `range`
    start: int | None  # None if it is only known at run time
    end: ast.expr  # end of `range`, exclusive


@dataclass
class Facts:
    """Parts that were found in a script; a part that was not found is None."""

    source: Source
    options: dict[str, Any]  # options of argparse, with their defaults
    framework: Framework | None  # the framework that the script uses
    ported: bool  # True if the script imports the library
    made: list[Made]  # all assignments, by line
    model: Made | None = None
    optimizers: list[Made] = field(default_factory=list)  # first one, and others with a `step` call
    loader: Made | None = None
    epoch_loop: EpochLoop | None = None
    far_loop: ast.For | None = None  # a loop that trains through several functions
    step_loop: ast.For | ast.While | None = None  # a loop over steps instead of epochs
    batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None  # steps of the whole training, if the script has a step loop
    metric: str = ""  # variable in the epoch loop that has the name of a metric

    @property
    def optimizer(self) -> Made | None:
        """The first optimizer, or None."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def train_set(self) -> ast.expr | None:
        """Dataset of the loader, or None."""
        call = self.loader.value if self.loader else None
        return keyword(call, "dataset", 0) if isinstance(call, ast.Call) else None

    @property
    def agent(self) -> str:
        """Name of the agent in the script, or a free name if the script has no agent."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and called(node.value) == "ScalingAgent.from_env":
                return assigned(node) or "agent"
        return "scaling_agent" if "agent" in stores(self.source.tree) else "agent"


def look(source: Source) -> Facts:
    """Find the parts of a script without running it."""
    tree = source.tree
    ported = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elastic"
        for node in ast.walk(tree)
    )
    made = [
        Made(assigned(statement), statement, value, block)
        for block in blocks(tree)
        for statement in block
        if assigned(statement) and (value := value_of(statement)) is not None
    ]
    made.sort(key=lambda one: one.statement.lineno)
    facts = Facts(source, options(source), framework_of(tree), ported, made)
    numbers = Numbers(constants(tree), facts.options)
    facts.optimizers = _optimizers(source, made)
    facts.model = _model_of(facts.optimizer, made)
    loaders = [one for one in made if last_name(one.value) == "DataLoader"]
    loop, facts.loader = _loop_and_loader(source, loaders, numbers.constants)
    if loop is not None and _counts_steps(loop.statement, source):
        facts.step_loop, facts.loader = loop.statement, facts.loader or _training_one(loaders, [])
    facts.far_loop = _far_loop(source)
    if facts.loader and isinstance(facts.loader.value, ast.Call):
        facts.batch_size = numbers.batch_size(facts.loader.value, _values(facts))
    if facts.optimizer and isinstance(facts.optimizer.value, ast.Call):
        rate = numbers.of(_rate(facts.optimizer.value, source))
        facts.lr = float(rate) if rate else None
    if loop is not None:
        count = numbers.whole(loop.end)
        length = None if count is None else count - (loop.start or 0)
        if facts.step_loop is not None:
            facts.steps = length
        else:
            facts.epoch_loop, facts.epochs = loop, length
            facts.metric = _metric(loop.statement)
    elif facts.framework is None:
        loops = (n for n in ast.walk(tree) if isinstance(n, ast.While) and _trains(n))
        facts.step_loop = next(loops, None)
    if facts.framework is not None:
        _look_at_framework(facts, facts.framework, numbers)
    elif facts.ported:
        _look_at_library(facts, numbers)
    return facts


def _values(facts: Facts) -> dict[str, ast.expr]:
    return {one.name: one.value for one in facts.made}


def _look_at_library(facts: Facts, numbers: Numbers) -> None:
    for call in facts.source.calls:
        if last_name(call) == "load" and len(call.args) == 3:  # noqa: PLR2004 - model, optimizer, data
            facts.batch_size = facts.batch_size or numbers.batch_size(call, _values(facts))
            facts.lr = numbers.of(keyword(call, "lr")) or facts.lr
        elif last_name(call) == "epochs" and call.args and facts.epochs is None:
            facts.epochs = numbers.whole(call.args[0])
        elif last_name(call) in OPTIMIZERS and facts.lr is None:
            facts.lr = numbers.of(_rate(call, facts.source))


def _look_at_framework(facts: Facts, framework: Framework, numbers: Numbers) -> None:
    """Read the numbers from a framework's options, and from loaders and optimizers in methods."""
    source, batch, rate = facts.source, facts.batch_size, facts.lr
    if framework.name == "lightning":
        makers = (n for n in ast.walk(source.tree) if getattr(n, "name", "") == "train_dataloader")
        inner = [n for one in makers for n in ast.walk(one) if isinstance(n, ast.Call)]
        for call in inner if batch is None else ():
            if last_name(call) == "DataLoader":
                batch = numbers.batch_size(call, {})
        made = [call for call in source.calls if last_name(call) in OPTIMIZERS]
        rate = numbers.of(_rate(made[0], source)) if made and rate is None else rate
    facts.batch_size, facts.lr, epochs, steps = framework_numbers(
        framework, source, numbers, batch, rate
    )
    if framework.name != "accelerate":
        facts.epochs, facts.steps = epochs, steps


# --- optimizer and model


def _optimizers(source: Source, made: Sequence[Made]) -> list[Made]:
    found: dict[str, Made] = {}
    for one in made:
        if _is_optimizer(one):
            found.setdefault(one.name, one)
    calls = {called(call) for call in source.calls}
    first = next(iter(found), None)
    return [one for name, one in found.items() if name == first or f"{name}.step" in calls]


def _is_optimizer(one: Made) -> bool:
    """True if the value is a torch optimizer, or a call with parameters that is named like one."""
    if not isinstance(one.value, ast.Call):
        return False
    maker = last_name(one.value)
    if maker in OPTIMIZERS:
        return bool(one.value.args) or keyword(one.value, "params") is not None
    called_one = "optim" in maker.lower() or one.name.lower() in {"optimizer", "optim", "opt"}
    return called_one and bool(parameters_calls(one.value))


def parameters_calls(node: ast.AST) -> list[ast.Call]:
    """Return the calls of `NAME.parameters()` in an expression."""
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "parameters"
        and isinstance(call.func.value, ast.Name | ast.Attribute)
    ]


def _model_of(optimizer: Made | None, made: Sequence[Made]) -> Made | None:
    """Return the statement that makes the model that the optimizer updates."""
    if optimizer is None:
        return None
    before = [one for one in made if one.statement.lineno < optimizer.statement.lineno]
    owners = _owners(optimizer.value)
    for name in loads(optimizer.value) if not owners else ():
        for one in before:
            if one.name == name:
                owners = owners or _owners(one.value)
    for one in reversed(before):
        if owners and one.name == owners[0] and one.name not in loads(one.value):
            return one
    return None


def _owners(node: ast.expr) -> list[str]:
    """Return each NAME of calls such as `NAME.parameters()` or `NAME.part.parameters()`."""
    found = []
    for call in ast.walk(node):
        if last_name(call) not in {"parameters", "named_parameters"}:
            continue
        inner: ast.AST | None = call
        while isinstance(inner, ast.Call | ast.Attribute | ast.Subscript):
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        if isinstance(inner, ast.Name):
            found.append(inner.id)
    return found


# --- loops and loader


def _loop_and_loader(
    source: Source, loaders: list[Made], known: Any
) -> tuple[EpochLoop | None, Made | None]:
    """Return the outermost training loop over a `range`, and the loader that this loop reads."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For)]
    for statement in sorted(loops, key=lambda loop: loop.lineno):
        numbers, reached = _range_in(statement.iter), source.reached(statement)
        if numbers is None or not any(map(_trains, reached)):
            continue
        first = numbers.args[0] if len(numbers.args) > 1 else None
        start = 0 if first is None else Numbers(known, {}).whole(first)
        count = numbers.args[-1] if len(numbers.args) <= 2 else numbers.args[1]  # noqa: PLR2004
        read = {name for node in reached for name in loads(node)}
        own = [one for one in loaders if one.name in read]
        return EpochLoop(statement, numbers, start, count), _training_one(own, reached)
    return None, _training_one(loaders, [])


def _counts_steps(loop: ast.For, source: Source) -> bool:
    """True if each iteration is one step, because the loop contains no loop over batches."""
    return not any(
        isinstance(inner, ast.For | ast.While) and inner is not loop
        and any(map(_trains, source.reached(inner)))
        for node in source.reached(loop)
        for inner in ast.walk(node)
    )  # fmt: skip


def _far_loop(source: Source) -> ast.For | None:
    """Return a loop over a `range` that reaches `backward()` through several function calls."""
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        pending: list[ast.AST] = [loop] if _range_in(loop.iter) is not None else []
        known: set[str] = set()
        while pending:
            node = pending.pop()
            if _trains(node):
                return loop
            new = {last_name(call) for call in ast.walk(node)} & source.functions.keys() - known
            known |= new
            pending += [source.functions[name] for name in new]
    return None


def _range_in(iterated: ast.expr) -> ast.Call | None:
    for node in ast.walk(iterated):
        if isinstance(node, ast.Call) and called(node) in {"range", "trange", "tqdm.trange"}:
            return node
    return None


def _trains(node: ast.AST) -> bool:
    return calls_any(node, "backward")


def _training_one(loaders: Sequence[Made], reached: Sequence[ast.AST]) -> Made | None:
    iterated = {
        name
        for node in reached
        for loop in ast.walk(node)
        if isinstance(loop, ast.For) and _trains(loop)
        for name in loads(loop.iter)
    }

    def weight(one: Made) -> tuple[bool, bool, bool]:
        shuffled = "shuffle=True" in ast.unparse(one.value)
        return one.name in iterated, "train" in one.name, shuffled

    return max(loaders, key=weight, default=None)


def _metric(loop: ast.For) -> str:
    for statement in loop.body:
        name = assigned(statement) if isinstance(value_of(statement), ast.Call) else ""
        if "." not in name and LOOKS_LIKE_METRIC.search(name.lower()):
            return name
    return ""


def _rate(call: ast.Call, source: Source) -> ast.expr | None:
    """Return the learning rate in the call of an optimizer or of a function that makes one."""
    if last_name(call) in OPTIMIZERS:
        return keyword(call, "lr", 1)
    if (given := keyword(call, "lr")) is not None:
        return given
    for function in ast.walk(source.tree):
        if isinstance(function, ast.FunctionDef) and function.name == called(call):
            inner = (n for n in ast.walk(function) if isinstance(n, ast.Call))
            return next((keyword(n, "lr", 1) for n in inner if last_name(n) in OPTIMIZERS), None)
    return None


# --- scripts that can be ported


class Whole(NamedTuple):
    """Complete set of the parts that a portable script must have."""

    facts: Facts
    source: Source
    model: Made
    optimizer: Made
    loader: Made
    loader_call: ast.Call  # the call that makes the loader
    loop: EpochLoop

    @property
    def three(self) -> tuple[Made, Made, Made]:
        """Model, optimizer and loader, which `load` makes after the change."""
        return self.model, self.optimizer, self.loader

    @property
    def by_line(self) -> list[ast.stmt]:
        """Statements that make model, optimizer and loader, in the order of the script."""
        return sorted((one.statement for one in self.three), key=lambda one: one.lineno)

    @property
    def keeps_model(self) -> bool:
        """True if the optimizer's parameters are not exactly `model.parameters()`.

        Examples are groups of the model's parts, or a variable that holds parameters. In this case,
        model and optimizer keep their lines.
        """
        value, name = self.optimizer.value, self.model.name
        complete = sum(called(call) == f"{name}.parameters" for call in parameters_calls(value))
        mentions = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(value))
        return not complete or mentions > complete


def whole(facts: Facts) -> Whole | None:
    """Return the script with all its parts, or None if a part is missing."""
    model, optimizer, loader, loop = facts.model, facts.optimizer, facts.loader, facts.epoch_loop
    if model is None or optimizer is None or loader is None or loop is None:
        return None
    if facts.train_set is None or not isinstance(loader.value, ast.Call):
        return None
    return Whole(facts, facts.source, model, optimizer, loader, loader.value, loop)

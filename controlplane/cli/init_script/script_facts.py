"""Parts of a training script: model, optimizer, loader, epoch loop and numbers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.cli.init_script.frameworks import (
    Framework,
    framework_numbers,
    framework_of,
)
from controlplane.cli.init_script.syntax import (
    Block,
    Numbers,
    Source,
    assigned,
    batch_size,
    blocks,
    called,
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


@dataclass(frozen=True)
class Made:
    """A statement that assigns a value to a name."""

    name: str
    statement: ast.stmt
    value: ast.expr
    block: Block


@dataclass(frozen=True)
class EpochLoop:
    """Loop over epochs."""

    statement: ast.For
    numbers: ast.Call  # the call of `range`
    start: int | None  # None if only a run can tell
    count: ast.expr  # where `range` ends


@dataclass
class Facts:
    """Parts found in a script; None if not found."""

    source: Source
    model: Made | None = None
    optimizer: Made | None = None
    optimizers: list[Made] = field(default_factory=list)  # all that step, the first included
    loader: Made | None = None
    epoch_loop: EpochLoop | None = None
    far_loop: ast.For | None = None  # one that trains through several functions
    step_loop: ast.For | ast.While | None = None  # one that counts steps instead of epochs
    framework: Framework | None = None  # whose trainer or accelerator it uses
    options: dict[str, Any] = field(default_factory=dict)  # of argparse: name and default
    batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None  # of the whole training, if the script counts steps
    metric: str = ""  # a variable of the epoch loop with the name of a metric
    ported: bool = False  # it imports the library

    @property
    def train_set(self) -> ast.expr | None:
        """Dataset of the loader."""
        call = self.loader.value if self.loader else None
        return keyword(call, "dataset", 0) if isinstance(call, ast.Call) else None


def look(source: Source) -> Facts:
    """Find the parts of a script without running it."""
    facts = Facts(source, options=options(source.tree))
    facts.ported = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elastic"
        for node in ast.walk(source.tree)
    )
    known = constants(source.tree)
    made = _all_made(source.tree)
    facts.optimizers = _optimizers(source.tree, made)
    facts.optimizer = next(iter(facts.optimizers), None)
    facts.model = _model_of(facts.optimizer, made)
    loaders = [one for one in made if last_name(one.value) == "DataLoader"]
    facts.epoch_loop, facts.loader = _loop_and_loader(source.tree, loaders, known)
    if (loop := facts.epoch_loop) is not None and _counts_steps(loop.statement, source.tree):
        facts.step_loop, facts.loader = loop.statement, facts.loader or _training_one(loaders, [])
    facts.far_loop = _far_loop(source.tree)
    facts.framework = framework_of(source.tree)
    numbers = Numbers(known, facts.options)
    if facts.loader and isinstance(facts.loader.value, ast.Call):
        facts.batch_size = batch_size(
            facts.loader.value, numbers, {one.name: one.value for one in made}
        )
    if facts.optimizer and isinstance(facts.optimizer.value, ast.Call):
        rate = numbers.of(_rate(facts.optimizer.value, source.tree))
        facts.lr = float(rate) if rate else None
    if (loop := facts.epoch_loop) is not None:
        count = numbers.of(loop.count)
        length = int(count) - (loop.start or 0) if count is not None else None
        if facts.step_loop is not None:
            facts.steps, facts.epoch_loop = length, None
        else:
            facts.epochs, facts.metric = length, _metric(loop.statement)
    elif facts.framework is None:
        loops = [n for n in ast.walk(source.tree) if isinstance(n, ast.While) and _trains(n)]
        facts.step_loop = next(iter(loops), None)
    if facts.framework is not None:
        _look_at_framework(facts, facts.framework, numbers)
    elif facts.ported:
        _look_at_library(facts, numbers, made)
    return facts


def _look_at_library(facts: Facts, numbers: Numbers, made: list[Made]) -> None:
    """Read the numbers of a script that uses the library from its calls of the agent."""
    tree = facts.source.tree
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if last_name(call) == "load" and len(call.args) == 3:  # noqa: PLR2004 - model, optimizer, data
            values = {one.name: one.value for one in made}
            facts.batch_size = facts.batch_size or batch_size(call, numbers, values)
            facts.lr = numbers.of(keyword(call, "lr")) or facts.lr
        elif last_name(call) == "epochs" and call.args and facts.epochs is None:
            count = numbers.of(call.args[0])
            facts.epochs = int(count) if count is not None else None
        elif last_name(call) in OPTIMIZERS and facts.lr is None:
            facts.lr = numbers.of(_rate(call, tree))


def _look_at_framework(facts: Facts, framework: Framework, numbers: Numbers) -> None:
    """Read the numbers of a framework's options, and of loaders and optimizers in methods."""
    tree = facts.source.tree
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    batch, rate = facts.batch_size, facts.lr
    if framework.name == "lightning":
        training = [n for n in ast.walk(tree) if getattr(n, "name", "") == "train_dataloader"]
        inner = [n for one in training for n in ast.walk(one) if last_name(n) == "DataLoader"]
        for call in inner if batch is None else ():
            batch = batch_size(call, numbers, {}) if isinstance(call, ast.Call) else None
        made = [call for call in calls if last_name(call) in OPTIMIZERS]
        rate = numbers.of(_rate(made[0], tree)) if made and rate is None else rate
    found = framework_numbers(framework, tree, numbers, batch, rate)
    facts.batch_size, facts.lr = found.batch_size, found.lr
    if framework.name != "accelerate":
        facts.epochs, facts.steps = found.epochs, found.steps


def _all_made(tree: ast.Module) -> list[Made]:
    found = []
    for block in blocks(tree):
        for statement in block:
            name, value = assigned(statement), value_of(statement)
            if name and value is not None:
                found.append(Made(name, statement, value, block))
    return sorted(found, key=lambda one: one.statement.lineno)


def _optimizers(tree: ast.Module, made: list[Made]) -> list[Made]:
    """Return the first optimizer, and those with other names whose `step` is called."""
    found: dict[str, Made] = {}
    for one in made:
        if _is_optimizer(one):
            found.setdefault(one.name, one)
    steps = {call.removesuffix(".step") for call in _calls(tree) if call.endswith(".step")}
    first = next(iter(found), None)
    return [one for name, one in found.items() if name == first or name in steps]


def _is_optimizer(one: Made) -> bool:
    """True for torch's optimizers, and for calls with parameters and a name like one."""
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


def _model_of(optimizer: Made | None, made: list[Made]) -> Made | None:
    """Return the statement that makes the model whose parameters the optimizer takes."""
    if optimizer is None:
        return None
    before = [one for one in made if one.statement.lineno < optimizer.statement.lineno]
    owners = _owners(optimizer.value)
    for name in loads(optimizer.value) if not owners else ():
        for one in before:
            if one.name == name:
                owners = owners or _owners(one.value)
    if not owners:
        return None
    name = owners[0]
    return next(
        (one for one in reversed(before) if one.name == name and name not in loads(one.value)), None
    )


def _owners(node: ast.expr) -> list[str]:
    """Return the names in calls like `NAME.parameters()` or `NAME.part.parameters()`."""
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


def _loop_and_loader(
    tree: ast.Module, loaders: list[Made], known: dict[str, Any]
) -> tuple[EpochLoop | None, Made | None]:
    """Return the outermost counting loop that trains, and the loader that it reads."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for statement in sorted(loops, key=lambda loop: loop.lineno):
        numbers = _range_in(statement.iter)
        reached = [statement, *(functions[n] for n in _calls(statement) if n in functions)]
        if numbers is None or not any(_trains(node) for node in reached):
            continue
        read = loads(statement) | {n for node in reached for n in loads(node)}
        own = [one for one in loaders if one.name in read]
        return _epoch_loop(statement, numbers, known), _training_one(own, reached)
    return None, _training_one(loaders, [])


def _counts_steps(loop: ast.For, tree: ast.Module) -> bool:
    """True if a loop has no loop over batches inside, so that each round is a step."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

    def reached(node: ast.AST) -> list[ast.AST]:
        return [node, *(functions[name] for name in _calls(node) if name in functions)]

    return not any(
        isinstance(inner, ast.For | ast.While) and inner is not loop
        and any(map(_trains, reached(inner)))
        for node in reached(loop)
        for inner in ast.walk(node)
    )  # fmt: skip


def _far_loop(tree: ast.Module) -> ast.For | None:
    """Return a counting loop that reaches `backward()` through several calls."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        reached: list[ast.AST] = [loop] if _range_in(loop.iter) is not None else []
        known: set[str] = set()
        while reached:
            node = reached.pop()
            if _trains(node):
                return loop
            new = {last_name(call) for call in ast.walk(node)} & functions.keys() - known
            known |= new
            reached += [functions[name] for name in new]
    return None


def _range_in(iterated: ast.expr) -> ast.Call | None:
    for node in ast.walk(iterated):
        if called(node) in {"range", "trange", "tqdm.trange"} and isinstance(node, ast.Call):
            return node
    return None


def _calls(node: ast.AST) -> set[str]:
    return {called(n) for n in ast.walk(node) if isinstance(n, ast.Call)}


def _trains(node: ast.AST) -> bool:
    return any(last_name(n) == "backward" for n in ast.walk(node))


def _training_one(loaders: list[Made], reached: list[Any]) -> Made | None:
    """Return the loader whose batches are trained on."""
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


def _epoch_loop(statement: ast.For, numbers: ast.Call, known: dict[str, Any]) -> EpochLoop:
    first = numbers.args[0] if len(numbers.args) > 1 else None
    start = 0 if first is None else Numbers(known, {}).of(first)
    count = numbers.args[-1] if len(numbers.args) <= 2 else numbers.args[1]  # noqa: PLR2004
    return EpochLoop(statement, numbers, None if start is None else int(start), count)


def _metric(loop: ast.For) -> str:
    for statement in loop.body:
        if isinstance(value_of(statement), ast.Call):
            name = assigned(statement)
            if name and "." not in name and LOOKS_LIKE_METRIC.search(name.lower()):
                return name
    return ""


def _rate(call: ast.Call, tree: ast.Module) -> ast.expr | None:
    """Return the learning rate in the call of an optimizer or of the function that makes it."""
    if last_name(call) in OPTIMIZERS:
        return keyword(call, "lr", 1)
    if (given := keyword(call, "lr")) is not None:
        return given
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == called(call):
            inner = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
            return next((keyword(n, "lr", 1) for n in inner if last_name(n) in OPTIMIZERS), None)
    return None


@dataclass(frozen=True)
class Whole:
    """All parts of a script that can be ported."""

    source: Source
    model: Made
    optimizer: Made
    loader: Made
    loader_call: ast.Call  # what makes the loader
    train_set: ast.expr
    loop: EpochLoop
    metric: str  # a variable of the epoch loop with the name of a metric; empty: none

    @property
    def three(self) -> tuple[Made, Made, Made]:
        """Model, optimizer and loader, which `load` makes."""
        return self.model, self.optimizer, self.loader

    @property
    def agent(self) -> str:
        """Name of the agent in the script."""
        return agent_name(self.source.tree)

    @property
    def keeps_model(self) -> bool:
        """True if the optimizer takes anything but `model.parameters()` alone.

        For example groups by parts of the model, or a variable that holds parameters: model and
        optimizer then keep their lines.
        """
        of_all = f"{self.model.name}.parameters"
        whole = [call for call in parameters_calls(self.optimizer.value) if called(call) == of_all]
        mentions = [
            node
            for node in ast.walk(self.optimizer.value)
            if isinstance(node, ast.Name) and node.id == self.model.name
        ]
        return not whole or len(mentions) > len(whole)


def whole(facts: Facts) -> Whole | None:
    """Return the script with all its parts; None if one is missing."""
    model, optimizer, loader, loop = facts.model, facts.optimizer, facts.loader, facts.epoch_loop
    if model is None or optimizer is None or loader is None or loop is None:
        return None
    if facts.train_set is None or not isinstance(loader.value, ast.Call):
        return None
    return Whole(
        facts.source, model, optimizer, loader, loader.value, facts.train_set, loop, facts.metric
    )


def agent_name(tree: ast.Module) -> str:
    """Return a name for the agent that the script does not use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and called(node.value) == "ScalingAgent.from_env":
            return assigned(node) or "agent"
    return "scaling_agent" if "agent" in stores(tree) else "agent"

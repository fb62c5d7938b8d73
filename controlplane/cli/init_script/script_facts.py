"""What a training script is made of: model, optimizer, loader, the loop over epochs, numbers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.cli.init_script.syntax import (
    Block,
    Source,
    assigned,
    blocks,
    called,
    keyword,
    last_name,
    loads,
    value_of,
)

OPTIMIZERS: Final = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "Adadelta",
     "Adafactor", "RMSprop", "Rprop", "ASGD", "Muon"}
)  # fmt: skip
LOOKS_LIKE_METRIC: Final = re.compile(r"acc|accuracy|val_|valid|f1|bleu|perplexity|ppl|auc|error")


@dataclass(frozen=True)
class Made:
    """A statement that makes something and gives it a name."""

    name: str
    statement: ast.stmt
    value: ast.expr
    block: Block


@dataclass(frozen=True)
class EpochLoop:
    """The loop over epochs."""

    statement: ast.For
    numbers: ast.Call  # the call of `range`
    start: int | None  # None: it is not known before the script runs
    count: ast.expr  # where `range` ends


@dataclass
class Facts:
    """What was found; None where it was not."""

    source: Source
    model: Made | None = None
    optimizer: Made | None = None
    loader: Made | None = None
    epoch_loop: EpochLoop | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of argparse, by their names, defaults
    batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    metric: str = ""  # a variable of the epoch loop that looks like one
    ported: bool = False  # it imports the library

    @property
    def train_set(self) -> ast.expr | None:
        """The dataset of the loader."""
        call = self.loader.value if self.loader else None
        return keyword(call, "dataset", 0) if isinstance(call, ast.Call) else None


def look(source: Source) -> Facts:
    """Everything that can be found in a script without running it.

    Args:
        source: the script.
    """
    facts = Facts(source, options=_options(source.tree))
    facts.ported = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elastic"
        for node in ast.walk(source.tree)
    )
    constants = _constants(source.tree)
    made = _all_made(source.tree)
    facts.optimizer = next((one for one in made if _is_optimizer(one)), None)
    facts.model = _model_of(facts.optimizer, made)
    loaders = [one for one in made if last_name(one.value) == "DataLoader"]
    facts.epoch_loop, facts.loader = _loop_and_loader(source.tree, loaders, constants)
    numbers = _Numbers(constants, facts.options)
    if facts.loader and isinstance(facts.loader.value, ast.Call):
        facts.batch_size = _batch_size(facts.loader.value, numbers, made)
    if facts.optimizer and isinstance(facts.optimizer.value, ast.Call):
        rate = numbers.of(_rate(facts.optimizer.value, source.tree))
        facts.lr = float(rate) if rate else None
    if (loop := facts.epoch_loop) is not None:
        count = numbers.of(loop.count)
        facts.epochs = int(count) - (loop.start or 0) if count is not None else None
        facts.metric = _metric(loop.statement)
    return facts


def _all_made(tree: ast.Module) -> list[Made]:
    found = []
    for block in blocks(tree):
        for statement in block:
            name, value = assigned(statement), value_of(statement)
            if name and value is not None:
                found.append(Made(name, statement, value, block))
    return sorted(found, key=lambda one: one.statement.lineno)


def _is_optimizer(one: Made) -> bool:
    """Torch's own by their names; others by what they take and what they are called."""
    if not isinstance(one.value, ast.Call):
        return False
    maker = last_name(one.value)
    if maker in OPTIMIZERS:
        return bool(one.value.args) or keyword(one.value, "params") is not None
    called_one = "optim" in maker.lower() or one.name.lower() in {"optimizer", "optim", "opt"}
    return called_one and bool(parameters_calls(one.value))


def parameters_calls(node: ast.AST) -> list[ast.Call]:
    """The calls of `NAME.parameters()` in an expression.

    Args:
        node: any.
    """
    return [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "parameters"
        and isinstance(call.func.value, ast.Name | ast.Attribute)
    ]


def _model_of(optimizer: Made | None, made: list[Made]) -> Made | None:
    """Whose parameters the optimizer takes, where it is first made."""
    if optimizer is None:
        return None
    before = [one for one in made if one.statement.lineno < optimizer.statement.lineno]
    calls = parameters_calls(optimizer.value)
    for name in loads(optimizer.value) if not calls else ():
        for one in before:
            if one.name == name:
                calls = calls or parameters_calls(one.value)
    if not calls:
        return None
    name = called(calls[0]).partition(".")[0]
    return next(
        (one for one in reversed(before) if one.name == name and name not in loads(one.value)), None
    )


def _loop_and_loader(
    tree: ast.Module, loaders: list[Made], constants: dict[str, Any]
) -> tuple[EpochLoop | None, Made | None]:
    """The outermost counting loop in which something is trained, and what it reads."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for statement in sorted(loops, key=lambda loop: loop.lineno):
        numbers = _range_in(statement.iter)
        reached = [statement, *(functions[n] for n in _calls(statement) if n in functions)]
        if numbers is None or not any(_trains(node) for node in reached):
            continue
        read = loads(statement) | {n for node in reached for n in loads(node)}
        mine = [one for one in loaders if one.name in read]
        return _epoch_loop(statement, numbers, constants), _training_one(mine, reached)
    return None, _training_one(loaders, [])


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
    """The loader whose batches are trained on."""
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


def _epoch_loop(statement: ast.For, numbers: ast.Call, constants: dict[str, Any]) -> EpochLoop:
    first = numbers.args[0] if len(numbers.args) > 1 else None
    start = 0 if first is None else _Numbers(constants, {}).of(first)
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
    """The learning rate in the making of an optimizer, or in the script's function for that."""
    if last_name(call) in OPTIMIZERS:
        return keyword(call, "lr", 1)
    if (given := keyword(call, "lr")) is not None:
        return given
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == called(call):
            inner = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
            return next((keyword(n, "lr", 1) for n in inner if last_name(n) in OPTIMIZERS), None)
    return None


# --- numbers


def _options(tree: ast.Module) -> dict[str, Any]:
    """Options of argparse and their defaults, by the names that the parsed arguments have."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if last_name(node) != "add_argument" or not isinstance(node, ast.Call):
            continue
        names = [n.value for n in node.args if isinstance(n, ast.Constant)]
        longest = max((str(name) for name in names), key=len, default="")
        dest, default = keyword(node, "dest"), keyword(node, "default")
        name = str(dest.value) if isinstance(dest, ast.Constant) else longest.lstrip("-")
        if name and longest.startswith("--"):
            literal = _literal(default) if default is not None else None
            found[name.replace("-", "_")] = literal
    return found


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that are bound once, to a literal; fields of classes and defaults among them."""
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and (name := assigned(node)):
            found.setdefault(name, []).append(_literal(node.value))
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            for argument, default in zip(arguments, node.args.defaults, strict=True):
                found.setdefault(argument.arg, []).append(_literal(default))
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


class _Numbers:
    """What expressions come to, as far as literals say it."""

    def __init__(self, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._constants = constants
        self._options = options

    def of(self, node: ast.expr | None) -> float | int | None:
        """The number that `node` is; None if nobody knows before the script runs."""
        value = self._value(node)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        return value if good else None

    def _value(self, node: ast.expr | None) -> Any:
        if isinstance(node, ast.BinOp):
            left, right = self.of(node.left), self.of(node.right)
            if left is None or right is None:
                return None
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
            return None
        if isinstance(node, ast.Name):
            return self._constants.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._options.get(node.attr, self._constants.get(node.attr))
        return _literal(node)


def _batch_size(call: ast.Call, numbers: _Numbers, made: list[Made]) -> int | None:
    found = numbers.of(keyword(call, "batch_size", 1))
    for spread in (k.value for k in call.keywords if k.arg is None):
        for one in made if found is None else ():
            if isinstance(spread, ast.Name) and one.name == spread.id:
                found = _in_mapping(one.value, numbers)
    return int(found) if found is not None else None


def _in_mapping(value: ast.expr, numbers: _Numbers) -> float | int | None:
    if isinstance(value, ast.Dict):
        for key, inner in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "batch_size":
                return numbers.of(inner)
    if called(value) == "dict" and isinstance(value, ast.Call):
        return numbers.of(keyword(value, "batch_size"))
    return None

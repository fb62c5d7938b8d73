"""Remarks on lines that a cluster refuses, or that several workers run differently.

A loss that is a sum over the batch is found only if the syntax tree shows the sum.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from controlplane.cli.init_script.frameworks import refused_options
from controlplane.cli.init_script.script_facts import Facts
from controlplane.cli.init_script.syntax import (
    Source,
    called,
    calls_any,
    dotted,
    keyword,
    last_name,
    literal,
    loads,
)

Line = tuple[int, str]
ONE_IS_ENOUGH: Final = frozenset({"torch.save", "SummaryWriter", "wandb.init"})
ASKS_FIRST: Final = re.compile("rank|main_process")
SUMMED: Final = (
    "the loss is a sum over the batch, so that gradients depend on how the batch is split: divide "
    "it by len(inputs) before backward(); for SGD, multiply the learning rate by batch_size"
)
OWN_RATE: Final = (
    "the rate is set in each step from the script's own counter. A worker that joins or resumes "
    "has another step counter. Make a scheduler (LambdaLR) after load(), or count with agent.step"
)
LEFT_EARLY: Final = "the batch loop ends early: all workers have to leave it in the same step"
ACCUMULATES: Final = (
    "a step for several batches is refused: step in each, and raise batch_size; "
    "a share above max_local_batch is computed in several passes"
)
SIDE_BY_SIDE: Final = (
    "two loaders are read side by side, and agent.load() deals out one: "
    "give it one dataset whose samples have both parts"
)
LBFGS: Final = (
    "LBFGS evaluates its closure several times in a step, which is refused: "
    "use an optimizer that evaluates it once, such as SGD or Adam"
)
SPARSE: Final = "sparse gradients are refused in a group: leave `sparse=True` out"


def advice(facts: Facts) -> list[str]:
    """Return remarks on lines that work differently with several workers than in one process."""
    first = f"{facts.agent}.rank == 0"
    if facts.framework is not None:
        first = "accelerator.is_main_process" if facts.framework.name == "accelerate" else ""
    early = ((line, LEFT_EARLY) for line in _conditions(facts, lambda n: isinstance(n, ast.Break)))
    return _in_order([*(_for_one_worker(facts.source, first) if first else ()), *early])


def refused(facts: Facts) -> list[str]:
    """Return remarks on lines that fail or misbehave on a cluster, each with its remedy."""
    source = facts.source
    found = [
        *((line, SUMMED) for line in summed_losses(source.tree)),
        *_unusable(source.tree),
        *((line, OWN_RATE) for line in _own_rates(facts)),
        *((line, SIDE_BY_SIDE) for line in _side_by_side(facts)),
    ]
    if facts.framework is not None:
        return _in_order([*found, *refused_options(facts.framework, source)])
    step = f"{facts.optimizer.name if facts.optimizer else 'optimizer'}.step"
    steps = _conditions(facts, lambda node: called(node) == step)
    return _in_order([*found, *((line, ACCUMULATES) for line in steps)])


def _in_order(found: Iterable[Line]) -> list[str]:
    return [f"line {line}: {problem}" for line, problem in sorted(set(found))]


def _for_one_worker(source: Source, first: str) -> Iterator[Line]:
    asked = {
        node
        for test in ast.walk(source.tree)
        if isinstance(test, ast.If) and ASKS_FIRST.search(ast.unparse(test.test))
        for node in ast.walk(test)
    }
    for call in source.calls:
        name = called(call)
        if name in ONE_IS_ENOUGH and call not in asked:
            yield call.lineno, f"every worker runs {name}(): guard it with `if {first}:`"
        elif last_name(call) == "spawn" and name.split(".")[0] in {"mp", "torch"}:
            yield call.lineno, "the cluster starts the processes: call the function directly"


# --- loops over batches: every worker takes part in each batch, and each batch is one step


def _batch_loops(facts: Facts) -> list[ast.For]:
    epochs = facts.epoch_loop.statement if facts.epoch_loop else None
    loops = (n for n in ast.walk(facts.source.tree) if isinstance(n, ast.For) and n is not epochs)
    return [loop for loop in loops if calls_any(loop, "backward")]


def _conditions(facts: Facts, wanted: Callable[[ast.AST], bool]) -> Iterator[int]:
    """Yield the line of each `if` in loops over batches that has a `wanted` node in its body."""
    for node in (n for loop in _batch_loops(facts) for n in ast.walk(loop)):
        body = node.body if isinstance(node, ast.If) else []
        if any(wanted(inner) for part in body for inner in ast.walk(part)):
            yield getattr(node, "lineno", 0)


def _own_rates(facts: Facts) -> Iterator[int]:
    loops: list[ast.AST] = [*_batch_loops(facts), *filter(None, [facts.step_loop])]
    names = {called(node) for loop in loops for node in ast.walk(loop)}
    functions = (n for n in ast.walk(facts.source.tree) if isinstance(n, ast.FunctionDef))
    loops += [function for function in functions if function.name in names]
    for node in (n for loop in loops for n in ast.walk(loop)):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Subscript) and literal(target.slice) == "lr":
            yield target.lineno


def _side_by_side(facts: Facts) -> Iterator[int]:
    loaders = {one.name for one in facts.made if last_name(one.value) == "DataLoader"}
    for loop in _batch_loops(facts):
        zips = [node for node in ast.walk(loop.iter) if called(node) == "zip"]
        if any(len(loads(node) & loaders) > 1 for node in zips):
            yield loop.lineno


# --- optimizers, gradients and datasets that the library refuses


def _unusable(tree: ast.Module) -> Iterator[Line]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom() if node.level:
                names = ", ".join(alias.name for alias in node.names)
                plain = f"from {node.module} import {names}" if node.module else f"import {names}"
                problem = "a relative import, but a job's script is run as a file of no package"
                yield node.lineno, f"{problem}: write `{plain}`, with the module beside the script"
            case ast.Call():
                if last_name(node) == "LBFGS":
                    yield node.lineno, LBFGS
                if literal(keyword(node, "sparse")) is True:
                    yield node.lineno, SPARSE
            case ast.ClassDef():
                bases = {dotted(base).rpartition(".")[2] for base in node.bases}
                methods = {getattr(one, "name", "") for one in node.body}
                if "IterableDataset" in bases and "__len__" not in methods:
                    problem = f"{node.name} has no length, which is refused"
                    remedy = "give it a __len__ that returns the samples of one pass"
                    yield node.lineno, f"{problem}: {remedy}"


# --- losses that are sums over the batch


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
BRANCHES: Final = (ast.If, ast.Try, ast.Match)
RETURN_A_LOSS: Final = frozenset({"training_step", "compute_loss"})  # their results are losses
SAME_VALUE: Final = frozenset(
    {"view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "clone",
     "to", "cuda", "cpu", "float", "double", "half"}
)  # fmt: skip
SCALED: Final = frozenset({"mul", "multiply", "div", "divide", "true_divide"})


class Kind(Enum):
    """Relation of an expression's value to the samples of a batch."""

    SUM = auto()  # a sum over the batch that is not divided
    EACH = auto()  # one or more values for each sample
    OTHER = auto()  # a mean, a sum that is divided, or unknown


class Value(NamedTuple):
    """Kind of an expression, with the line of its sum."""

    kind: Kind
    line: int = 0  # line of the sum


class Binding(NamedTuple):
    """An expression that is assigned to a name."""

    value: ast.expr
    statement: ast.AST
    end: tuple[int, int]  # line and column after which the name has the value


OTHER: Final = Value(Kind.OTHER)


def summed_losses(tree: ast.Module) -> Iterator[int]:
    """Yield the lines where a sum over the batch makes a loss."""
    script = _Script(tree)
    for loss in _losses(tree):
        value = script.value(loss)
        if value.kind is Kind.SUM:
            yield value.line


def _losses(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node) == "backward":
            yield from node.args[:1]
            if isinstance(node.func, ast.Attribute):
                yield node.func.value
        if isinstance(node, ast.FunctionDef) and node.name in RETURN_A_LOSS:
            yield from _returns(node)


class _Script:
    """Names and functions of a script, and the kinds of its expressions."""

    def __init__(self, tree: ast.Module) -> None:
        self._above = {
            inner: outer for outer in ast.walk(tree) for inner in ast.iter_child_nodes(outer)
        }
        self._bindings: dict[str, list[Binding]] = defaultdict(list)
        self._plain: dict[str, list[Function]] = defaultdict(list)
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._of_class: dict[tuple[str, str], Function] = {}
        self._imported: set[str] = set()
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._origins_of: dict[ast.expr, list[ast.expr]] = {}
        self._values: dict[ast.expr, Value] = {}
        for node in ast.walk(tree):
            self._index(node)
        for bindings in self._bindings.values():
            bindings.sort(key=lambda binding: binding.end)

    def _index(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value, node)
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                self._bind(node.target, value, node)
            case ast.AugAssign():
                changed = ast.BinOp(node.target, node.op, node.value)
                self._bind(node.target, ast.copy_location(changed, node), node)
            case ast.For():
                self._bind(node.target, node.iter, node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                outer = self._above[node]
                if isinstance(outer, ast.ClassDef):
                    self._methods[node.name].append(node)
                    self._of_class[outer.name, node.name] = node
                else:
                    self._plain[node.name].append(node)
            case ast.Import() | ast.ImportFrom():
                self._imported |= {(a.asname or a.name).split(".")[0] for a in node.names}

    def _bind(self, target: ast.expr, value: ast.expr, statement: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for place, part in enumerate(target.elts):
                item = ast.Subscript(value, ast.Constant(place))
                self._bind(part, ast.copy_location(item, value), statement)
        elif name := dotted(target):
            end = (value.end_lineno or 0, value.end_col_offset or 0)
            self._bindings[name].append(Binding(value, statement, end))

    # --- kinds of expressions

    def value(self, node: ast.expr) -> Value:
        """Return the kind of an expression, following names and calls of local functions."""
        if node not in self._values:
            self._values[node] = OTHER  # ends cycles, as in `total = total + loss`
            origins = self._origins(node)
            values = [self._reduce(node)] if origins == [node] else [*map(self.value, origins)]
            same = len({value.kind for value in values}) == 1
            self._values[node] = values[0] if same else OTHER
        return self._values[node]

    def _reduce(self, node: ast.expr) -> Value:
        match node:
            case ast.UnaryOp():
                return self.value(node.operand)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._added([node.left, node.right])
            case ast.BinOp(op=ast.Mult()) if not loads(node.left):
                return self.value(node.right)
            case ast.BinOp(op=ast.Mult() | ast.Div()) if not loads(node.right):
                return self.value(node.left)
            case ast.Tuple(elts=[loss, *_]):  # a framework uses the first item as the loss
                return self.value(loss)
            case ast.Dict():
                return next(map(self.value, _items(node, "loss")), OTHER)
            case ast.Call():
                return self._called(node)
        return OTHER

    def _added(self, parts: Sequence[ast.expr]) -> Value:
        values = [self.value(part) for part in parts]
        for kind in (Kind.SUM, Kind.EACH):
            for value in values:
                if value.kind is kind:
                    return value
        return OTHER

    def _called(self, call: ast.Call) -> Value:
        if keyword(call, "reduction") is not None:
            return self._criterion(call)
        values = {self._criterion(made) for made in self._origins(call.func)}
        if values != {OTHER}:
            return values.pop() if len(values) == 1 else OTHER
        name, argument = last_name(call).removesuffix("_"), next(iter(call.args), None)
        if called(call) == "sum" and argument is not None:
            return self._sum_of_items(argument, call.lineno)
        if name == "scale" and argument is not None:  # method of a gradient scaler
            return self.value(argument)
        if not isinstance(call.func, ast.Attribute):
            return OTHER
        operand, others = call.func.value, call.args
        if dotted(operand) == "torch" and others:
            operand, *others = others
        if name in SAME_VALUE or (name in SCALED and others and not loads(others[0])):
            return self.value(operand)
        if name == "sum":
            named = keyword(call, "dim") or keyword(call, "axis")
            return self._sum(operand, named or next(iter(others), None), call.lineno)
        return OTHER

    def _criterion(self, made: ast.expr) -> Value:
        """Return the kind of a loss according to the option `reduction` of a call."""
        given = keyword(made, "reduction") if isinstance(made, ast.Call) else None
        text = [literal(origin) for origin in self._origins(given)] if given is not None else []
        if text and all(one == "sum" for one in text):
            return Value(Kind.SUM, made.lineno)
        return Value(Kind.EACH) if text and all(one == "none" for one in text) else OTHER

    def _sum(self, operand: ast.expr, dims: ast.expr | None, line: int) -> Value:
        value, given = self.value(operand), literal(dims)
        samples = dims is None or given == 0 or (isinstance(given, tuple | list) and 0 in given)
        return Value(Kind.SUM, line) if value.kind is Kind.EACH and samples else value

    def _sum_of_items(self, items: ast.expr, line: int) -> Value:
        match items:
            case ast.List() | ast.Tuple():
                return self._added(items.elts)
            case ast.ListComp() | ast.GeneratorExp():
                return self.value(items.elt)
        return self._sum(items, None, line)

    # --- names and local functions

    def _origins(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions from which a name, branch, item or local call gets its value."""
        if node not in self._origins_of:
            self._origins_of[node] = [node]  # ends cycles
            if given := self._given(node):
                self._origins_of[node] = [o for one in given for o in self._origins(one)]
        return self._origins_of[node]

    def _given(self, node: ast.expr) -> list[ast.expr]:
        match node:
            case ast.IfExp():
                return [node.body, node.orelse]
            case ast.NamedExpr():
                return [node.value]
            case ast.Subscript():
                wholes = self._origins(node.value)
                return [part for one in wholes for part in _items(one, literal(node.slice))]
            case ast.Call():
                return [value for one in self._functions(node) for value in _returns(one)]
            case ast.Name() | ast.Attribute():
                return self._bound(node, dotted(node))
        return []

    def _bound(self, node: ast.expr, name: str) -> list[ast.expr]:
        """Return the expressions that may be the value of a name at the place of `node`."""
        bindings = self._bindings.get(name, [])
        scope = own = self._scope(node)
        while scope is not None:
            inside = [one for one in bindings if self._scope(one.statement) is scope]
            place = (node.lineno, node.col_offset)
            before = [one for one in inside if scope is not own or one.end <= place]
            found = self._reaching(before, node) or self._passed(scope, name)
            if found := found or self._reaching(inside, node):  # set one iteration earlier
                return found
            scope = self._scope(scope)
        return [one.value for one in bindings] if "." in name else []

    def _reaching(self, bindings: list[Binding], node: ast.AST) -> list[ast.expr]:
        """Return the last value, and earlier values that it replaces only if its branch is run."""
        around, found = set(self._outer(node)), []
        for one in reversed(bindings):
            found.append(one.value)
            outer = set(self._outer(one.statement)) - around
            if not any(isinstance(part, BRANCHES) for part in outer):
                break
        return found

    def _passed(self, scope: ast.AST, name: str) -> list[ast.expr]:
        """Return the expressions that the calls of a function pass as its parameter `name`."""
        if not isinstance(scope, Function):
            return []
        given = scope.args
        places = [one.arg for one in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(reversed(places), reversed(given.defaults), strict=False))
        defaults |= {
            one.arg: value
            for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
            if value is not None
        }
        places = places[places[:1] == ["self"] :]
        place = places.index(name) if name in places else None
        if place is None and name not in {one.arg for one in given.kwonlyargs}:
            return []
        calls = [call for call in self._calls if scope in self._functions(call)]
        passed = [keyword(call, name, place) or defaults.get(name) for call in calls]
        return [value for value in passed if value is not None]

    def _functions(self, call: ast.Call) -> list[Function]:
        name, of_object = last_name(call), isinstance(call.func, ast.Attribute)
        if dotted(call.func).partition(".")[0] in self._imported:
            return []
        if (called(call), "__init__") in self._of_class:
            return [self._of_class[called(call), "__init__"]]
        if found := (self._methods if of_object else self._plain).get(name):
            return found
        made = self._origins(call.func)
        forward = [self._of_class.get((called(one), "forward")) for one in made]
        lambdas = [one for one in made if isinstance(one, ast.Lambda)]
        return [*lambdas, *(one for one in forward if one is not None)]

    def _scope(self, node: ast.AST) -> ast.AST | None:
        scopes = (n for n in self._outer(node) if isinstance(n, Function | ast.Module))
        return next(scopes, None)

    def _outer(self, node: ast.AST) -> Iterator[ast.AST]:
        while (outer := self._above.get(node)) is not None:
            yield outer
            node = outer


def _items(whole: ast.expr, key: Any) -> list[ast.expr]:
    """Return the item `key` of a tuple, list or dict display in a list, or [] if it is missing."""
    match whole:
        case ast.Tuple() | ast.List() if isinstance(key, int):
            return whole.elts[key : key + 1]
        case ast.Dict():
            pairs = zip(whole.keys, whole.values, strict=True)
            return [value for name, value in pairs if name is not None and literal(name) == key]
    return []


def _returns(function: Function) -> list[ast.expr]:
    if isinstance(function, ast.Lambda):
        return [function.body]
    found: list[ast.expr] = []
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return found

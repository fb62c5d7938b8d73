"""Port of a script to the library, or the reasons against it."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field, replace
from typing import Final

from controlplane.cli.init_script.edits import (
    IMPORT,
    WRAPPERS,
    counted_epochs,
    distributed_edits,
    import_edit,
    load_edits,
    report_edits,
    sort_between,
)
from controlplane.cli.init_script.frameworks import Framework, adapter_edits
from controlplane.cli.init_script.remarks import advice, refused
from controlplane.cli.init_script.script_facts import Facts, Whole, look, whole
from controlplane.cli.init_script.syntax import Source, keyword, last_name

MAX_LINES: Final = 6  # changed lines up to which a metric is reported, too


@dataclass
class Port:
    """Result of porting a script."""

    text: str = ""  # the new script; empty if it cannot be ported
    missing: list[str] = field(default_factory=list)  # what has to be done by hand
    refused: list[str] = field(default_factory=list)  # lines that fail or misbehave on a cluster
    advice: list[str] = field(default_factory=list)  # other lines to look at

    def diff(self, before: str, name: str) -> str:
        """Return the change of the text `before` as a unified diff."""
        lines = (before.splitlines(keepends=True), self.text.splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}")) if self.text else ""


def changed_lines(diff: str) -> int:
    """Return the number of added lines in a diff."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())


def port(facts: Facts, name: str = "train.py") -> Port:
    """Make a script use the library.

    Returns:
        The new text, which is valid Python, or the reasons why there is none.
    """
    done = Port(missing=_missing(facts), refused=refused(facts), advice=advice(facts))
    if done.missing:
        return done
    if facts.framework is not None:
        return _with_adapter(facts, facts.framework, done)
    removed = distributed_edits(facts)
    done.advice += removed.advice
    done.missing += removed.problems
    single = whole(look(Source(facts.source.edited(removed.edits))))
    if single is None:
        done.missing.append(
            "lines are missing without its own process group: port the script by hand"
        )
        return done
    source, agent = single.source, single.facts.agent
    between = sort_between(single)
    done.missing += between.problems
    if done.missing:
        return done
    epochs = counted_epochs(source, single.loop, f"{agent}.epochs")
    changes = [
        import_edit(source, IMPORT),
        *load_edits(single, between),
        source.replace(single.loop.numbers, epochs),
    ]
    done.text = source.edited(changes)
    reporting = source.edited([*changes, *report_edits(single)])
    if changed_lines(replace(done, text=reporting).diff(facts.source.text, name)) <= MAX_LINES:
        done.text = reporting
    elif facts.metric:
        line = f"`{facts.agent}.report({facts.metric}={facts.metric})`"
        done.advice.append(f"{line} at the end of each epoch makes it a metric of the job")
    try:
        ast.parse(done.text)
    except SyntaxError as error:
        done.text = ""
        done.missing.append(
            f"line {error.lineno}: the change would not be valid Python: make it by hand"
        )
    return done


def _with_adapter(facts: Facts, framework: Framework, done: Port) -> Port:
    """Replace the trainer of a framework by our adapter."""
    source, loop = facts.source, facts.epoch_loop
    counted = None
    if loop is not None:
        counted = (loop.numbers, counted_epochs(source, loop, "EPOCHS"))
    adapter = adapter_edits(source, framework, counted)
    done.missing += adapter.problems
    if not done.missing:
        names = ", ".join(sorted(adapter.needed))
        line = f"from elastic.{framework.name} import {names}" if names else ""
        done.text = source.edited([import_edit(source, line), *adapter.edits])
    return done


# --- what is missing


def _missing(facts: Facts) -> list[str]:
    if facts.ported:
        return ["the script imports the library already"]
    if facts.framework is not None:
        return []
    found = []
    if facts.optimizer is None:
        found.append("no line makes an optimizer of torch.optim: pass one to agent.load() by hand")
    elif facts.model is None:
        line = facts.optimizer.statement.lineno
        found.append(
            f"line {line}: no `model.parameters()` of a model made above: "
            "give the optimizer all parameters of the model"
        )
    if facts.loader is None:
        found.append(
            "no `NAME = DataLoader(...)` is iterated for training: pass the data to agent.load()"
        )
    if facts.epoch_loop is None:
        found.append(_no_loop(facts))
    elif facts.loader is not None and facts.train_set is None:
        line = facts.loader.statement.lineno
        found.append(f"line {line}: no dataset in the call: pass the training set to agent.load()")
    if len(facts.optimizers) > 1:
        one, other = facts.optimizers[:2]
        second = f"line {other.statement.lineno}: a second optimizer, `{other.name}`"
        remedy = "let build_model return one nn.ModuleDict and build_optimizer a tuple"
        found = [f"{second} beside `{one.name}`: {remedy}; docs/exactness.md shows such a loop"]
    found += _wrapped_elsewhere(facts)
    if not found and (script := whole(facts)) is not None:
        found += [*_apart(script), *_unusual_loader(script)]
    return found


def _no_loop(facts: Facts) -> str:
    loop = facts.step_loop or facts.far_loop
    if loop is None:
        return (
            "no `for epoch in range(...)` around `backward()`: write `for epoch in agent.epochs(N)`"
        )
    head, _, _ = facts.source.of(loop).partition("\n")
    at = f"line {loop.lineno}: `{head}`"
    if facts.step_loop is not None:
        return (
            f"{at} counts steps, whose batch changes on a cluster: write "
            "`for epoch in agent.epochs(N)` around a loop over the loader; "
            "stop = { samples = STEPS x BATCH } in the job file ends it after as many samples"
        )
    return (
        f"{at} trains in other functions: pass them what agent.load() "
        "returns, and loop over agent.epochs(N) there"
    )


def _wrapped_elsewhere(facts: Facts) -> list[str]:
    """Return DDP wrappers that are not among the lines of model, optimizer and loader."""
    block = facts.optimizer.block if facts.optimizer else []
    near = {node for statement in block for node in ast.walk(statement)}
    remedy = "leave it out: the agent's group reduces gradients"
    return [
        f"line {call.lineno}: `{facts.source.of(call.func)}(...)` away from the optimizer: {remedy}"
        for call in facts.source.calls
        if last_name(call) in WRAPPERS and call not in near
    ]


def _apart(script: Whole) -> list[str]:
    """Return what keeps the three from being replaced in one place."""
    source, optimizer = script.source, script.optimizer
    found = [
        f"line {one.statement.lineno}: `{one.name}` is made in another block than the optimizer "
        f"(line {optimizer.statement.lineno}): make them in the same one"
        for one in (script.model, script.loader)
        if one.block is not optimizer.block
    ]
    for one in script.three:
        line, alone = source.line_of(one.statement).strip(), source.of(one.statement)
        if not line.startswith(alone) or line.removeprefix(alone).lstrip().startswith(";"):
            found.append(f"line {one.statement.lineno}: give each statement a line of its own")
    return found


def _unusual_loader(script: Whole) -> list[str]:
    at = f"line {script.loader.statement.lineno}"
    if keyword(script.loader_call, "batch_sampler") is not None:
        remedy = "give batch_size, and pad in collate_fn"
        return [f"{at}: a batch sampler, but the agent decides the order of samples: {remedy}"]
    sampler = keyword(script.loader_call, "sampler", 3)
    if sampler is None or isinstance(sampler, ast.Constant | ast.IfExp):
        return []
    text = script.source.of(sampler)
    made = [script.source.of(one.value) for one in script.facts.made if one.name == text]
    if any("Distributed" in maker for maker in (text, *made)):
        return []
    return [f"{at}: a sampler of the script's own: put weights and filters into the dataset"]

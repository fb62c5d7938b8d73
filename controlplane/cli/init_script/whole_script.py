"""A script with all parts of a training, which can be ported."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from controlplane.cli.init_script.script_facts import (
    EpochLoop,
    Facts,
    Made,
    parameters_calls,
)
from controlplane.cli.init_script.syntax import Source, assigned, called, stores


@dataclass(frozen=True)
class Whole:
    """Parts of a script, none of which is missing."""

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

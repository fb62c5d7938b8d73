"""Model hopping (Cerebro): model states move from node to node, and the training data stays."""

from elastic.sweep_worker.unit import Unit
from elastic.sweep_worker.unit_runner import Trained

__all__ = ["Trained", "Unit"]

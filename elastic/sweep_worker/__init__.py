"""Model hopping (Cerebro): units of training whose state moves between nodes; data do not."""

from elastic.sweep_worker.unit import Unit
from elastic.sweep_worker.unit_runner import Trained

__all__ = ["Trained", "Unit"]

"""Model hopping (Cerebro): units of training whose states move between nodes, unlike the data."""

from elastic.sweep_worker.unit import Unit
from elastic.sweep_worker.unit_runner import Trained

__all__ = ["Trained", "Unit"]

"""Model hopping (Cerebro): units of training whose state travels while data stay in place."""

from elastic.sweep_worker.unit import Unit
from elastic.sweep_worker.unit_runner import Trained

__all__ = ["Trained", "Unit"]

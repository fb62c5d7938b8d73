"""Model hopping: units of training whose state travels and whose data stays (Cerebro)."""

from elastic.sweep_worker.unit import Unit
from elastic.sweep_worker.unit_runner import Trained

__all__ = ["Trained", "Unit"]

"""Model hopping: units of training whose state travels and whose data stays (Cerebro)."""

from elastic.hopper.trained_objects import Trained
from elastic.hopper.unit import Unit

__all__ = ["Trained", "Unit"]

"""The 50 workloads of the paper's Table 2 on V100-like nodes of four (ONES sections 4.1, 4.2)."""

from controlplane.sim.physics.table2.generator import generate
from controlplane.sim.physics.table2.model import TYPICAL_COSTS, Table2
from controlplane.sim.physics.table2.workloads import closest, duration_s

__all__ = ["TYPICAL_COSTS", "Table2", "closest", "duration_s", "generate"]

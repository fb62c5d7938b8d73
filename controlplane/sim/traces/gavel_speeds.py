"""How fast the workloads of Gavel train, to know how long the jobs of its traces take.

From `simulation_throughputs.json` of https://github.com/stanford-futuredata/gavel (MIT), V100,
jobs alone and consolidated, four significant digits; Narayanan et al., *Heterogeneity-Aware
Cluster Scheduling Policies for Deep Learning Workloads*, OSDI '20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Workload -> GPUs -> steps per second, counted as the traces count `total_steps`.
# fmt: off
STEPS_PER_S: Final[Mapping[str, Mapping[int, float]]] = {
    "A3C": {1: 7.176},
    "CycleGAN": {1: 4.426},
    "LM (batch size 5)": {1: 109.2, 2: 185.7, 4: 126.7, 8: 698.8},
    "LM (batch size 10)": {1: 81.65, 2: 163.1, 4: 121.5, 8: 615.1},
    "LM (batch size 20)": {1: 64.74, 2: 132.2, 4: 111, 8: 497.3},
    "LM (batch size 40)": {1: 45.24, 2: 91.59, 4: 96.03, 8: 359.3},
    "LM (batch size 80)": {1: 28.24, 2: 58.09, 4: 74.81, 8: 231.2},
    "Recommendation (batch size 512)": {1: 23.32},
    "Recommendation (batch size 1024)": {1: 13.28},
    "Recommendation (batch size 2048)": {1: 7.47},
    "Recommendation (batch size 4096)": {1: 3.906},
    "Recommendation (batch size 8192)": {1: 2.842},
    "ResNet-18 (batch size 16)": {1: 32.35, 2: 100.1, 4: 123.9, 8: 382.6},
    "ResNet-18 (batch size 32)": {1: 29.95, 2: 94.25, 4: 114.7, 8: 340},
    "ResNet-18 (batch size 64)": {1: 24.09, 2: 74.14, 4: 95.59, 8: 255.8},
    "ResNet-18 (batch size 128)": {1: 17.99, 2: 23.99, 4: 69.95, 8: 162.1},
    "ResNet-18 (batch size 256)": {1: 10.3, 2: 15.88, 4: 27.78, 8: 81.51},
    "ResNet-50 (batch size 16)": {1: 11.4, 2: 13.86, 4: 23.2, 8: 27.8},
    "ResNet-50 (batch size 32)": {1: 7.787, 2: 10.83, 4: 13.76, 8: 24.07},
    "ResNet-50 (batch size 64)": {1: 4.395, 2: 7.922, 4: 9.452, 8: 17.3},
    "ResNet-50 (batch size 128)": {1: 2.497, 2: 4.223, 4: 7.029, 8: 10.29},
    "Transformer (batch size 16)": {1: 11.06, 2: 14.15, 4: 20.08, 8: 71.65},
    "Transformer (batch size 32)": {1: 10.62, 2: 13.33, 4: 22.82, 8: 63.98},
    "Transformer (batch size 64)": {1: 8.618, 2: 15.88, 4: 19.66, 8: 49.65},
    "Transformer (batch size 128)": {1: 5.446, 2: 10.07, 4: 14.17, 8: 30.88},
    "Transformer (batch size 256)": {1: 1.595, 2: 2.885, 4: 4.763, 8: 9.717},
}
# fmt: on

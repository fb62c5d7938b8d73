"""Public Python API to submit and follow jobs and sweeps."""

from controlplane.client.blocking import BlockingClient
from controlplane.client.client import Client
from controlplane.client.connection import Home, find_home
from controlplane.client.sweeps.sweep import (
    ASHA,
    PBT,
    Choice,
    Grid,
    Hyperband,
    Integer,
    LogInteger,
    LogUniform,
    MedianStopping,
    RandomSearch,
    SuccessiveHalving,
    Sweep,
    Uniform,
)
from schemas.jobs import JobSpec, StopRule

__all__ = [
    "ASHA",
    "PBT",
    "BlockingClient",
    "Choice",
    "Client",
    "Grid",
    "Home",
    "Hyperband",
    "Integer",
    "JobSpec",
    "LogInteger",
    "LogUniform",
    "MedianStopping",
    "RandomSearch",
    "StopRule",
    "SuccessiveHalving",
    "Sweep",
    "Uniform",
    "find_home",
]

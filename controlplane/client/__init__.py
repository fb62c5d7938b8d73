"""What users import to submit and follow jobs; needs `schemas` only."""

from controlplane.client.blocking import BlockingClient
from controlplane.client.client import Client
from controlplane.client.home import Home, find_home
from schemas.jobs import JobSpec, StopRule

__all__ = ["BlockingClient", "Client", "Home", "JobSpec", "StopRule", "find_home"]

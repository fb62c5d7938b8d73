"""What users import to submit and follow jobs; needs `schemas` only."""

from controlplane.client.async_client import Client
from controlplane.client.blocking_client import BlockingClient
from controlplane.client.cluster_home import Home, find_home
from schemas.jobs import JobSpec, StopRule

__all__ = ["BlockingClient", "Client", "Home", "JobSpec", "StopRule", "find_home"]

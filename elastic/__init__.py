"""What a training script imports: `ScalingAgent`, and what it may raise."""

from elastic.errors import ElasticError
from elastic.job import ScalingAgent

__all__ = ["ElasticError", "ScalingAgent"]

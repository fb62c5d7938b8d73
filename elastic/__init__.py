"""What a training script imports: `ScalingAgent`, and what it may raise."""

from elastic.imports_uncollected import imports_uncollected

with imports_uncollected():
    from elastic.scaling_agent import ScalingAgent
    from elastic.training_errors import ElasticError

__all__ = ["ElasticError", "ScalingAgent"]

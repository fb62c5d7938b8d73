"""Elastic training library: `ScalingAgent` and the base class of its errors."""

from elastic.gc_free_import import gc_free_import

with gc_free_import():
    from elastic.agent import ScalingAgent
    from elastic.training_errors import ElasticError

__all__ = ["ElasticError", "ScalingAgent"]

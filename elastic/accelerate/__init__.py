"""Accelerate's `Accelerator` as an elastic job: `accelerator = ElasticAccelerator(...)`."""

from elastic.accelerate.elastic_accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]

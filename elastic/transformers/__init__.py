"""Hugging Face's `Trainer` as an elastic job: `class ElasticTrainer(ElasticMixin, Trainer)`."""

from elastic.transformers.trainer_mixin import ElasticMixin, ElasticTrainer

__all__ = ["ElasticMixin", "ElasticTrainer"]

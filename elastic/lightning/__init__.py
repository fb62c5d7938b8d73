"""Lightning's `Trainer` as an elastic job: `Trainer(strategy=ElasticStrategy(), ...)`."""

from elastic.lightning.elastic_strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]

"""Export: samples of a meter as Prometheus metrics under vLLM's names (extra `metrics`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockstep.impl.serving.meter import Kind, Sample

PREFIX: Final = "vllm:"
_TYPES: Final[dict[Kind, Any]] = {
    Kind.COUNTER: Counter,
    Kind.GAUGE: Gauge,
    Kind.HISTOGRAM: Histogram,
}
_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS: Final = tuple(2**power for power in range(15))


class Exporter:
    """Adds samples to a registry; a metric is created with its first sample.

    Args:
        registry: the registry that shows the metrics, one for each process.
        model_name: a label of all metrics, like `engine`.
        engine: the index of the engine among those that serve the model.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: int = 0) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._metrics: dict[str, Any] = {}

    def take(self, samples: Iterable[Sample]) -> None:
        """Increase counters, observe histograms and set gauges."""
        for sample in samples:
            labels = self._labels | (dict([sample.label]) if sample.label else {})
            metric = self._find(sample, tuple(labels)).labels(**labels)
            if sample.kind is Kind.COUNTER:
                metric.inc(sample.value)
            elif sample.kind is Kind.GAUGE:
                metric.set(sample.value)
            else:
                metric.observe(sample.value)

    def _find(self, sample: Sample, labels: tuple[str, ...]) -> Any:
        known = self._metrics.get(sample.name)
        if known is None:
            more: dict[str, Any] = {}
            if sample.kind is Kind.HISTOGRAM:
                more["buckets"] = _SECONDS if sample.name.endswith("_seconds") else _TOKENS
            name, text = PREFIX + sample.name, sample.name.replace("_", " ")
            known = _TYPES[sample.kind](name, text, labels, registry=self._registry, **more)
            self._metrics[sample.name] = known
        return known

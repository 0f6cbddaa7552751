"""Metrics: numbers of a campaign for Prometheus, on a port of the command that runs it."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.campaign.summary import Summary
from blockstep.conformance.protocol.features import UsageError

GAUGES = {
    "events": "Events played",
    "episodes": "Episodes played",
    "goals": "Coverage goals and pairs reached",
    "defects": "Defects that are not known",
    "failures": "Failed episodes",
}
"""Gauges of each target."""


class Metrics:
    """Gauges that are served on a port."""

    def __init__(self, port: int) -> None:
        """Serve metrics. Raises UsageError: the package is not installed, or the port is taken."""
        try:
            import prometheus_client as client  # noqa: PLC0415 - an extra
        except ImportError:
            what = "prometheus-client is not installed; pip install 'blockstep[metrics]'"
            raise UsageError(f"--metrics {port}: {what}") from None
        registry = client.CollectorRegistry()
        self._gauges: dict[str, Any] = {
            name: client.Gauge(f"blockstep_campaign_{name}", text, ["target"], registry=registry)
            for name, text in GAUGES.items()
        }
        self._leases: Any = client.Gauge(
            "blockstep_campaign_leases", "Units that are leased", registry=registry
        )
        try:
            client.start_http_server(port, registry=registry)
        except OSError as error:
            raise UsageError(f"--metrics {port}: {error.strerror}") from None

    def set(self, summary: Summary) -> None:
        """Set the gauges."""
        for target, total in zip(summary.plan.targets, summary.totals.targets, strict=True):
            values = {
                "events": total.events,
                "episodes": total.episodes,
                "goals": len(total.goals),
                "defects": sum(target.name in row.seen for row in summary.new),
                "failures": sum(total.sayings.values()),
            }
            for name, value in values.items():
                self._gauges[name].labels(target.name).set(value)
        self._leases.set(sum(bool(lease.owner) for lease in summary.leases))

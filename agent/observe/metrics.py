"""The agent's own metrics, in a registry of their own."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "intercept_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All that is counted. Names start with `intercept_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.enrolments = self._counter(
            "enrolments", "Pods whose capture was applied, by result and reason", "result", "reason"
        )
        self.removals = self._counter(
            "removals", "Captures that ended, by result and reason", "result", "reason"
        )
        self.drift = self._counter("drift", "Captures found altered", "result")
        self.cni_seconds = self._histogram(
            "cni_add_seconds", "Time that a CNI call took, by verb and result", "verb", "result"
        )
        self.apply_seconds = self._histogram(
            "apply_seconds", "Time that applying a capture took in its namespace"
        )
        self.phases = self._histogram(
            "enrolment_seconds",
            "Time that a step of enrolling a pod took, waiting for its turn included, by phase",
            "phase",
        )
        self.pods = self._gauge("pods", "Pods by state and backend", "state", "backend")
        self.connected = self._gauge(
            "source_connected", "Whether a source of pods answers", "source"
        )
        self.cni_present = self._gauge(
            "cni_entry_present",
            "Whether the plugin and its entry are on the node as they should be",
        )
        self.cni_repairs = self._gauge(
            "cni_entry_repairs", "How often the plugin or its entry was put back"
        )
        self.proxy_listening = self._gauge(
            "proxy_listening",
            "Whether somebody listens on both ports that the pod's traffic is redirected to",
            *("namespace", "pod"),
        )
        self.certificate_expiry = self._gauge(
            "proxy_certificate_expiry_seconds",
            "Time until the first certificate of the pod's proxy expires; negative if it has",
            *("namespace", "pod"),
        )
        self.leftovers = self._gauge(
            "leftovers", "What others left behind on this node, by kind", "kind"
        )
        self.worker_restarts = self._gauge(
            "worker_restarts", "How often the worker was started again"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=SECONDS, registry=self.registry)

    def enrolled(self, result: str, reason: str) -> None:
        self.enrolments.labels(result, reason).inc()

    def applied(self, seconds: float) -> None:
        self.apply_seconds.observe(seconds)

    def phase(self, phase: str, seconds: float) -> None:
        self.phases.labels(phase).observe(seconds)

    def removed(self, result: str, reason: str) -> None:
        self.removals.labels(result, reason).inc()

    def drifted(self, result: str) -> None:
        self.drift.labels(result).inc()

    def found_leftovers(self, counts: Mapping[str, int]) -> None:
        for kind, number in counts.items():
            self.leftovers.labels(kind).set(number)

    def text(self) -> bytes:
        return generate_latest(self.registry)

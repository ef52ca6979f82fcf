"""The agent's own metrics, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All that is counted. Names start with `intercept_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.enrolments = Counter(
            "intercept_enrolments",
            "Pods whose capture was applied, by result and reason",
            ["result", "reason"],
            registry=self.registry,
        )
        self.cni_seconds = Histogram(
            "intercept_cni_add_seconds",
            "Time that a CNI call took, by verb and result",
            ["verb", "result"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.apply_seconds = Histogram(
            "intercept_apply_seconds",
            "Time that applying a capture took in its namespace",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.drift = Counter(
            "intercept_drift", "Captures found altered", ["result"], registry=self.registry
        )
        self.pods = Gauge(
            "intercept_pods",
            "Pods by state and backend",
            ["state", "backend"],
            registry=self.registry,
        )
        self.connected = Gauge(
            "intercept_source_connected",
            "Whether a source of pods answers",
            ["source"],
            registry=self.registry,
        )
        self.cni_present = Gauge(
            "intercept_cni_entry_present",
            "Whether the plugin and its entry are on the node as they should be",
            registry=self.registry,
        )
        self.cni_repairs = Gauge(
            "intercept_cni_entry_repairs",
            "How often the plugin or its entry was put back",
            registry=self.registry,
        )
        self.worker_restarts = Gauge(
            "intercept_worker_restarts",
            "How often the worker was started again",
            registry=self.registry,
        )

    def enrolled(self, result: str, reason: str) -> None:
        self.enrolments.labels(result, reason).inc()

    def applied(self, seconds: float) -> None:
        self.apply_seconds.observe(seconds)

    def drifted(self, result: str) -> None:
        self.drift.labels(result).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

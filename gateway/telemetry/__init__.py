"""The telemetry of a node: metrics, logs, traces, and the samples of the live page."""

"""The telemetry of a node, with metrics, logs, traces, and the samples of the live page."""

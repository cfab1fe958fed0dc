"""The core of a worker, without I/O: sequences, KV blocks, the scheduler, text.

The engine turns a `StepPlan` into a `StepResult` on a device, the simulator with a model of one.
Both share these decisions.
"""

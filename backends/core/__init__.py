"""The sans-I/O heart of a worker: sequences, KV blocks, the one scheduler, text.

Whoever turns a `StepPlan` into a `StepResult` (the engine on a device, the simulator with a cost
model) gets the same decisions.
"""

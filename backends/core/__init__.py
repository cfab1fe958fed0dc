"""The core of a worker, without I/O: sequences, KV blocks, the scheduler, text.

The engine and the simulator share these decisions. The engine turns a `StepPlan` into a
`StepResult` on a device, and the simulator does so with a model of a device.
"""

"""The first run on a GPU: `python -m bench.gpu.first_run`."""

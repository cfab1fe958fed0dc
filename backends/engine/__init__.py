"""The engine: a worker that runs a model with torch; the only package with torch and Triton."""

import os

from draftgate.backends.engine.cpu_isa import limit_cpu_isa

# Idle threads of a CPU worker go to sleep soon, because spinning threads take cores from other
# workers and from the event loop. libgomp reads these variables when torch loads it, so set them
# before any import of torch. Milliseconds of a decode of the shipped model, 2 threads on 2 cores,
# alone and beside a second such process: always spinning 3.7 and 9-13 (in a seventh of the steps;
# the others wait for a descheduled thread), 10,000 spins 3.8 and 36, 1,000 spins 4.9 and 10, no
# spins 7.8 and 7.2; one thread alone 4.7 (AMD EPYC Zen 4, 2026-11-21).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
limit_cpu_isa()

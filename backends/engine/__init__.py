"""The engine: a worker that runs a model with torch.

The other packages of the server import neither torch nor Triton.
"""

import os

from draftgate.backends.engine.cpu_isa import limit_cpu_isa

# Idle threads of a CPU worker sleep after 1,000 spins, because spinning threads take cores from
# other workers and from the event loop. libgomp reads these variables when torch loads it, so this
# module sets them before any import of torch. The following times are milliseconds per decode of
# the shipped model with 2 threads on 2 cores, first alone, then while a second such process runs.
# With endless spinning a decode takes 3.7 alone. With the second process, a seventh of the decodes
# take 9 to 13, and all others wait for a descheduled thread. 10,000 spins take 3.8 and 36, 1,000
# spins 4.9 and 10, no spins 7.8 and 7.2. A single thread takes 4.7 alone (AMD EPYC Zen 4,
# 2026-11-21).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
limit_cpu_isa()

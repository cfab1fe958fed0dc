"""The worker on a device: the only place with torch and triton."""

import os

# Threads of a CPU worker sleep while they wait for work. Spinning ones take the cores from other
# workers and from the event loop: two workers of two threads each on two cores slowed each other
# 10 to 50 times. libgomp reads this when torch loads it, so it stands before any import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

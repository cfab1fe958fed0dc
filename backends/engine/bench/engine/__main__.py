"""`python -m backends.engine.bench.engine`."""

from backends.engine.bench.engine import main

main()

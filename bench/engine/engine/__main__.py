"""`python -m bench.engine.engine`."""

from bench.engine.engine import main

main()

"""`python -m bench.engine`."""

from bench.engine import main

main()

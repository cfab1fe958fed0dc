"""Entry point of `python -m bench.engine`."""

from bench.engine import main

main()

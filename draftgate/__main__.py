"""Run the command line: `python -m draftgate`, also from a checkout that is not installed."""

from draftgate.gateway.cli import main

main()

"""Studies in simulation: what policies give, over rates, traces and seeds.

Each is a command of `draftgate bench`, needs no torch, and gives the same figures for the same
command, whatever the machine.
"""

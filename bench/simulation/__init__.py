"""Simulated studies of policies over rates, traces and seeds.

Each study is a command of `draftgate bench` that needs no torch. The same command gives the same
results on any machine.
"""

"""Simulated studies of policies over rates, traces and seeds.

Each is a command of `draftgate bench` that needs no torch. The same command gives the same figures
on any machine.
"""

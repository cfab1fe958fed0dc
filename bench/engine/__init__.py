"""Measurements of the engine. Each writes one JSON: command, commit, device, date, raw figures."""

"""Moves of running streams to other workers.

`rescheduling` chooses moves between workers that keep running. `moves` carries out all moves of
`stream.Stream`, and `splice` joins the tokens of both workers.
"""

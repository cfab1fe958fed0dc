"""Moves of running streams to other workers.

`rescheduling` chooses moves between workers that keep running. `moves` carries out all moves of
`stream.Stream`. `handover` moves a stream from the worker of its prompt to that of its output.
`overlap` runs a stream on both workers, and `splice` joins their tokens.
"""

"""`draftgate simulate`: loadgen's requests through our own dispatcher and schedulers, fast forward.

Of the gateway only the command line may know `loadgen`; it is imported when the command runs.
"""

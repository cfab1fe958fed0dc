"""`draftgate simulate`, which sends loadgen's requests to the dispatcher in virtual time.

Only the command line may import `loadgen` within the gateway, and only when the command runs.
"""

"""`draftgate simulate`, which sends loadgen's requests to the dispatcher in virtual time."""

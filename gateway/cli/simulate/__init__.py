"""`draftgate simulate`: loadgen's requests through the production dispatcher, in virtual time.

Within the gateway only the command line may import `loadgen`, and it does so when the command runs.
"""

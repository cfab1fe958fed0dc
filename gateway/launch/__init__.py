"""Workers as actors of a Ray cluster, which Ray places and restarts and Redis lists.

    draftgate ray start ──> launcher ──Ray──> actor (one per worker) ──pipes──> child: serve

Only `cluster` imports Ray.
"""

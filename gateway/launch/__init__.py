"""Workers as actors of a Ray cluster: Ray places and restarts them, Redis makes them known.

    draftgate ray start ──> launcher ──Ray──> actor (one per worker) ──pipes──> child: serve

Only `cluster` and `actor` import Ray.
"""

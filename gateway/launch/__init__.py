"""Workers as actors of a Ray cluster: Ray says where and restarts, Redis says who is there.

    draftgate ray start ──> launcher ──Ray──> actor (one per worker) ──pipes──> child: serve

Only `cluster` and `actor` import Ray, and nothing outside this room does.
"""

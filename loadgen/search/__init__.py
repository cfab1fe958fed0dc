"""The highest rate at which a wanted share of requests meets its SLO, and how sure that is."""

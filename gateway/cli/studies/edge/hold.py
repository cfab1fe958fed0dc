"""The longest that the event loop is held."""
def longest_holds(rounds): return []

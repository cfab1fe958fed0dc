"""Rates x servers x modes of speculation, interleaved, and the goodput that can be read off."""

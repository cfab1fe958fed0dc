"""The demo models that ship with Draftgate."""

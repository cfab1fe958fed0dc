"""Trains the models that ship with Draftgate (`python -m training.train all`)."""

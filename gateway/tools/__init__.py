"""Function calls, with the formats of models and a parser of response text."""

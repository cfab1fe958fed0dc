"""The HTTP surface: OpenAI's API, and what operators need."""

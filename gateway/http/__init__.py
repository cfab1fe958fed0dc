"""The HTTP API: OpenAI's endpoints, and those for operators."""

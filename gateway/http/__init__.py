"""The HTTP API, with OpenAI's endpoints and the endpoints for operators."""

"""What clients get, in the shapes of OpenAI's API."""

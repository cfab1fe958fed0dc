"""The bodies of responses, in the format of OpenAI's API, and how answers are rendered."""

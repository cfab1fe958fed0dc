"""The bodies of responses in the format of OpenAI's API, and the code that renders them."""

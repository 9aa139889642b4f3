"""The HTTP server: the OpenAI chat API and the verbs of a session."""

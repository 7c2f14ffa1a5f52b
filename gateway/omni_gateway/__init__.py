"""The HTTP API: OpenAI's shapes in front of the bus."""

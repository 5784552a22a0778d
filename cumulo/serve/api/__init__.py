"""The endpoints, with one schema each: OpenAI's, Anthropic's and those of operators."""

"""What OpenAI's API has and the endpoints share: one idea per file."""

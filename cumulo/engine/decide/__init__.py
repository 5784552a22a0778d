"""Which requests run in the next step, and where their KV blocks lie. Pure."""

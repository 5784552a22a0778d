"""Anthropic's Messages API, for Anthropic's own clients: `request` is what may be asked and makes a chat request of
it, `messages` has the routes and words the answer."""

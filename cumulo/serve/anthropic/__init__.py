"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens, for Anthropic's own clients.

`endpoints` has the routes, `request` what may be asked, `as_chat` makes a chat request of it, `answer` words what
the model says.
"""

"""/v1/responses: OpenAI's newer way to ask for text. The same conversation as a chat completion, told in items.

`request` is what may be asked and makes a chat request of it, `items` words the answer, `endpoints` has the routes.
"""

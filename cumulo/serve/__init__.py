"""The server: OpenAI's and Anthropic's APIs over HTTP, in front of an engine process.

A request comes in over `http` (connections and their limits), passes the `gate` (who asks, how often, how much),
is read and validated by `bodies` as the schema of its endpoint in `api`, which makes a prompt of it and submits it
with a `call` through the `service` and the `engine_link` to the engine; what the engine says comes back to the
call, and the endpoint words it as one answer or as events.
"""

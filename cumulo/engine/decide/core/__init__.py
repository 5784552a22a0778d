"""The core of the engine's decisions: requests, slots and KV blocks, admission, preemption, and the rule for a
step.

It knows nothing of speculation, SLOs, sharing between keys, tiers, transfers or adapters: these are extensions,
which attach at the named points of `extension.py`. It imports only itself and the plain data of `params`,
`plan` and `story`.
"""

"""Which engine computes a prompt, which KV blocks travel from it, and in what order. With split roles the scheduler
of a decode engine asks here; `transfers.py` attaches the answers to it.

A decode engine that is given a long prompt orders its KV from a prefill engine. That one computes all known tokens
but the last and draws nothing; the decode engine copies the blocks layer by layer while later layers are computed,
computes the last token itself and draws. So nothing that was sampled has to travel, and an order that fails costs
time and no state: the prompt is computed again wherever that is predicted to be cheapest.
"""

"""How tenants share an engine: whose tokens a step computes, and who may hold how many slots and KV blocks."""

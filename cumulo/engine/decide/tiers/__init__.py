"""KV tiers: prefix blocks that leave the device go to host memory and from there to disk. Pure."""

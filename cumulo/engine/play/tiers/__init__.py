"""KV tiers beyond host memory: files, and the threads that write and read them."""

"""The fleet page: replicas, their caches, and how requests are routed to them."""

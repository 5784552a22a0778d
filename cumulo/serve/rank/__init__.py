"""How well texts fit each other: /v1/score and /v1/rerank."""

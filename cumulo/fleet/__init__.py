"""Several engines behind one address: how requests are routed, and how many replicas there should be. Used by
`cumulo serve`, `cumulo gateway` and the drivers of clusters.
"""

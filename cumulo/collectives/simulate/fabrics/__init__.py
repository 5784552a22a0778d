"""Fabrics link by link: Clos (fat-tree and rails), dragonfly, torus, and sites joined by long links."""

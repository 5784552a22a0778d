"""Fabrics link by link: Clos (fat-tree and rails), dragonfly, and sites joined by long links."""

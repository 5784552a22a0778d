"""Autoscaling: how many replicas each role of a fleet should have. `cumulo simulate autoscale` rehearses the rules
and `cumulo serve --autoscale` obeys them.
"""

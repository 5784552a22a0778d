"""Autoscaled fleets in virtual time, for `cumulo simulate autoscale` and `cumulo launch`."""

"""`cumulo collective` and `cumulo bench collectives`."""

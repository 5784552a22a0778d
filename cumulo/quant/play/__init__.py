"""A run of `cumulo quantize`: layer by layer through a model, and the folder it leaves."""

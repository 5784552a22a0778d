"""`cumulo bench kernels` on a GPU: every kernel beside the device's ceilings, and the tables of what wins there."""

"""Training: data, the decoder with gradients, optimizers, the loop. `cumulo train` and Python programs use it."""

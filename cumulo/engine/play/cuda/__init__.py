"""The parts of CudaRunner: a step as words, what is on the device, its launches and graphs, and its results."""

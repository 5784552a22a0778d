"""Round to nearest, AWQ, GPTQ, int8 and fp8: from a matrix to its codes."""

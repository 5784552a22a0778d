"""Model files: safetensors, GGUF, names of parameters, where files are found."""

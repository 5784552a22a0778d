"""Quantised matrices of Hugging Face folders: one data type per kind of number, one file per storage format."""

"""What is run, on what, split how: plain dataclasses, no torch."""

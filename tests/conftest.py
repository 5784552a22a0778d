"""For all tests: hypothesis draws the same cases every time, and a slow machine is not a failure."""

import os
from pathlib import Path

# Triton decides when it is first imported whether its interpreter plays the kernels, and any test may import it
# first. Where there is no GPU the interpreter must.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

settings.register_profile("cumulo", deadline=None, derandomize=True)
settings.load_profile("cumulo")

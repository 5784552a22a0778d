"""For all tests: hypothesis draws the same cases every time, and a slow machine is not a failure."""

from hypothesis import settings

settings.register_profile("cumulo", deadline=None, derandomize=True)
settings.load_profile("cumulo")

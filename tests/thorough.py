"""Whether `--thorough` was given: for tests that then take more steps. Set by conftest.py."""

chosen = False

"""A back end of Triton for CPUs: TTIR lowered to C++, compiled and run. Triton finds it by its entry point."""

"""The CPU path: kernels that Numba compiles, and the pool of threads that runs them (docs/kernels.md)."""

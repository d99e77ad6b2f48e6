"""The packed runtime with Triton kernels, on CUDA."""

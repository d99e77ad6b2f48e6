"""Triton kernels for packed tokens, each with a reference in plain torch.  Imported only where they run."""

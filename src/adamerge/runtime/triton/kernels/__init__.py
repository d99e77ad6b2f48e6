"""Triton kernels for packed tokens: one per file, a plain reference beside each.  Imported only where they run."""

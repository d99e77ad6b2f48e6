"""The supported libraries, one file each: where a model keeps its blocks and how to run them."""

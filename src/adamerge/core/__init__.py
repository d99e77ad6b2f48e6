"""The pure-tensor core: what a merge is and how one is decided."""

"""Compare, time and reproduce: the commands that measure."""

"""One paper, one file, one function that returns a Recipe; `none` and `random` are the baselines."""

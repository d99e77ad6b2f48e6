"""One file per paper, each with a function that returns a Recipe; `none` and `random` are baselines."""

"""One file for each host library; `stack` is the only block loop."""

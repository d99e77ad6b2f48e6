"""`python -m adamerge` is the command line."""

from adamerge.cli import main

main()

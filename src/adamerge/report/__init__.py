"""One HTML page from what `eval`, `compare`, `reproduce`, `bench` and `tune` wrote; it opens without a network."""

from adamerge.report.page import write_report

__all__ = ["write_report"]

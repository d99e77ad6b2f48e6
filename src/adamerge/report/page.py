"""Writes the page: all runs one after another, with style and script inside, so that it needs no other file."""

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path

import adamerge
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write, write_atomically
from adamerge.report.charts import definitions
from adamerge.report.find_runs import find_runs
from adamerge.report.html_table import pairs
from adamerge.report.run_report import RunReport

# The page is mailed and attached; 5 MB go everywhere.
MOST_BYTES = 5_000_000
# Nothing may be loaded, from nowhere: only the style, the script and the pictures inside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write one HTML page about runs of `eval`, `compare`, `reproduce`, `bench` and `tune`; gives its path.

    Args:
        runs: folders and files that these commands wrote; a run that was stopped is shown as far as it came.
        out: the file to write; by default report.html in the folder of a single run, else adamerge-report.html here.
    """
    paths = [Path(run) for run in runs]
    target = Path(out) if out is not None else default_path(paths)
    check_can_write(target)
    found = [report for path in paths for report in find_runs(path)]
    text = page(found)
    if len(text.encode()) > MOST_BYTES:
        raise BadOption(
            f"the report would have {len(text.encode()) / 1e6:.1f} MB and may have {MOST_BYTES / 1e6:g}; "
            "give fewer runs, or one page for each"
        )
    write_atomically(target, text)
    return target


def default_path(runs: Sequence[Path]) -> Path:
    """Where the page goes if nobody says."""
    return runs[0] / "report.html" if len(runs) == 1 and runs[0].is_dir() else Path("adamerge-report.html")


def page(runs: Sequence[RunReport]) -> str:
    """The whole page."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    titles = [f"{run.command}: {run.title}" for run in runs]
    heading = titles[0] if len(titles) == 1 else f"{len(titles)} runs of adamerge"
    links = "".join(f'<li><a href="#run-{number}">{escape(title)}</a></li>' for number, title in enumerate(titles))
    contents = f'<nav aria-label="Runs"><ul>{links}</ul></nav>' if len(titles) > 1 else ""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = "".join(_section(run, number) for number, run in enumerate(runs))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{style}</style></head><body>{definitions()}"
        f"<header><h1>{escape(heading)}</h1>"
        f'<p class="faint">Written by adamerge {adamerge.__version__} on {when}. Hold the pointer on a point, or use '
        "Tab and the arrow keys, to read its values. A click on a heading sorts a table.</p>"
        f"{contents}</header>"
        f'<main>{sections}</main><div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _section(run: RunReport, number: int) -> str:
    missing = ""
    if run.missing:
        lines = "".join(f"<li>{escape(text)}</li>" for text in run.missing)
        missing = f'<div class="missing"><strong>What is missing</strong><ul>{lines}</ul></div>'
    summary = "".join(f"<p>{escape(text)}</p>" for text in run.summary)
    return (
        f'<section id="run-{number}" aria-labelledby="title-{number}"><h2 id="title-{number}">'
        f"{escape(run.command)}: {escape(run.title)}</h2>"
        f'<p class="source">{escape(run.source)}</p>{missing}{summary}{"".join(run.blocks)}'
        f"{pairs('Provenance: versions, device, settings', run.provenance)}</section>"
    )

"""HTML tables whose cells hold the exact value of the file beside the rounded one that is shown."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

# A page with more rows would grow beyond its limit.
MOST_ROWS = 1500


@dataclass(frozen=True)
class Shown:
    """A column of a table: its key in the rows, its heading, and the format of its numbers (empty for text)."""

    key: str
    heading: str
    form: str = ""

    def write(self, text: str) -> str:
        """The text of a cell as it is shown: a number in the column's format, anything else unchanged."""
        number = _number(text) if self.form else None
        return text if number is None else self.form.format(number)


def table(
    title: str,
    columns: Sequence[Shown],
    rows: Sequence[Mapping[str, str]],
    *,
    source: str = "",
    note: str = "",
    best: Collection[int] = (),
) -> str:
    """A table that a click on a heading sorts.

    Args:
        title: the caption.
        columns: what is shown; a column without any value is left out.
        rows: the rows of the file, as text.
        source: the file that the rows are from.
        note: a sentence below the table.
        best: the numbers of rows to mark as the best.
    """
    used = [column for column in columns if any(row.get(column.key) for row in rows)]
    body = "".join(_row(row, used, index in best) for index, row in enumerate(rows[:MOST_ROWS]))
    notes = [note] if note else []
    if len(rows) > MOST_ROWS:
        notes.append(f"The first {MOST_ROWS} of {len(rows)} rows; the file has all.")
    return framed(title, used, body, source=source, notes=notes)


def framed(title: str, columns: Sequence[Shown], body: str, *, source: str = "", notes: Sequence[str] = ()) -> str:
    """A table with headings that sort, around rows that are HTML already."""
    head = "".join(
        f'<th scope="col" data-key="{escape(column.key)}" aria-sort="none">'
        f'<button type="button">{escape(column.heading)}</button></th>'
        for column in columns
    )
    below = "".join(f'<p class="note">{escape(text)}</p>' for text in notes)
    where = f' <span class="source">{escape(source)}</span>' if source else ""
    return (
        f'<figure class="wide"><figcaption>{escape(title)}{where}</figcaption><div class="scroll" tabindex="0" '
        f'role="region" aria-label="{escape(title)}"><table class="sortable" data-source="{escape(source)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}</figure>"
    )


def versions_of(text: str) -> dict[str, str]:
    """The versions in a cell of a file, by what they are the version of."""
    return {f"{name} version": str(version) for name, version in json.loads(text).items()} if text else {}


def _row(row: Mapping[str, str], columns: Sequence[Shown], best: bool) -> str:
    cells = "".join(_cell(column, row.get(column.key) or "") for column in columns)
    return f'<tr class="best">{cells}</tr>' if best else f"<tr>{cells}</tr>"


def _cell(column: Shown, text: str) -> str:
    shown = column.write(text)
    kind = ' class="number"' if _number(text) is not None else ""
    full = f' title="{escape(text)}"' if shown != text else ""
    return f'<td data-v="{escape(text)}"{kind}{full}>{escape(shown)}</td>'


def _number(text: str) -> float | None:
    """The number that a text is; None for other texts and for what is not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


def pairs(title: str, values: Mapping[str, str]) -> str:
    """Names and values under each other; closed until somebody opens it."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items() if value)
    return f"<details><summary>{escape(title)}</summary><dl>{lines}</dl></details>" if lines else ""

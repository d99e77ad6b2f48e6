"""Reads a report as a test does: its tables by source, its marks, and its list of what is missing."""

from html.parser import HTMLParser


class Parts(HTMLParser):
    """The tables of a page as {source: rows}, a row being {key: (exact, shown)}; marks as (x, y); what is missing."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: dict[str, list[dict[str, tuple[str, str]]]] = {}
        self.marks: list[tuple[str, str]] = []
        self.missing: list[str] = []
        self.images = 0
        self._keys: list[str] = []
        self._row: list[tuple[str, str]] = []
        self._source = ""
        self._in: str = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        if tag == "table":
            self._source, self._keys = given["data-source"], []
            self.tables[self._source] = []
        elif tag == "th":
            self._keys.append(given["data-key"])
        elif tag == "tr":
            self._row = []
        elif tag == "td":
            self._row.append((given["data-v"], ""))
            self._in = "td"
        elif tag == "div" and given.get("class") == "missing":
            self._in = "missing"
        elif tag == "li" and self._in == "missing":
            self.missing.append("")
            self._in = "missing line"
        elif tag == "img":
            self.images += 1
            assert given["src"].startswith("data:image/jpeg;base64,")
        if "data-x" in given:
            self.marks.append((given["data-x"], given["data-y"]))

    def handle_data(self, data):
        if self._in == "td":
            exact, shown = self._row[-1]
            self._row[-1] = exact, shown + data
        elif self._in == "missing line":
            self.missing[-1] += data

    def handle_endtag(self, tag):
        if tag == "td" or (tag == "div" and self._in == "missing"):
            self._in = ""
        elif tag == "li" and self._in == "missing line":
            self._in = "missing"
        elif tag == "tr" and self._row:
            self.tables[self._source].append(dict(zip(self._keys, self._row, strict=True)))

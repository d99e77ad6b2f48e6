"""What the page shows of one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunReport:
    """One run on the page.

    Attributes:
        command: the command that wrote it, such as "compare".
        title: its heading.
        source: the folder or file that it was read from.
        summary: sentences under the heading, as plain text.
        missing: what the run did not finish or left out, as plain text.
        blocks: tables, charts and pictures as HTML, in order.
        provenance: versions, device, date and settings by name.
    """

    command: str
    title: str
    source: str
    summary: Sequence[str] = ()
    missing: Sequence[str] = ()
    blocks: Sequence[str] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)

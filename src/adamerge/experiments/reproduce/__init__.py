"""Measures the paper's tables and claims on any model, and writes a report with a verdict on each claim."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write
from adamerge.experiments.reproduce import ablation, layers, proposition, refinement, table1, table2
from adamerge.experiments.reproduce.build_experiment import embedded_experiment, folder_experiment
from adamerge.experiments.reproduce.claims import Claim, Verdict
from adamerge.experiments.reproduce.experiment import Experiment
from adamerge.experiments.reproduce.report import read_section, write_report, write_section
from adamerge.experiments.reproduce.section import Section
from adamerge.experiments.run_record import RunRecord
from adamerge.experiments.store import ResultStore

__all__ = [
    "PARTS",
    "Claim",
    "Experiment",
    "Section",
    "Verdict",
    "choose",
    "embedded_experiment",
    "folder_experiment",
    "run",
]

# In the order of the report.
PARTS: dict[str, Callable[[Experiment, Path], Section]] = {
    "table1": table1.section,
    "table2": table2.section,
    "ablation": ablation.section,
    "layers": layers.section,
    "refinement": refinement.section,
    "proposition": proposition.section,
}


def choose(parts: Sequence[str]) -> list[str]:
    """The chosen parts in the order of the report; "all" chooses all."""
    unknown = [part for part in parts if part not in (*PARTS, "all")]
    if unknown or not parts:
        named = f"unknown: {', '.join(unknown)}" if unknown else "none was given"
        raise BadOption(f"reproduce takes {', '.join(PARTS)} or all; {named}")
    return [part for part in PARTS if part in parts or "all" in parts]


def run(
    parts: Sequence[str], experiment: Experiment, out: Path | str, *, each: Callable[[Section], None] | None = None
) -> list[Section]:
    """Measure the parts and write JSON, CSV and `report.md` to `out`; `each` is called with every finished part.

    Results are stored in `out/kept`, so that an interrupted run resumes where it stopped.  The report covers all parts
    in `out` that were measured with the same settings.
    """
    chosen, out = choose(parts), Path(out)
    check_can_write(out, folder=True)
    experiment = replace(experiment, store=ResultStore(out / "kept"))
    settings = experiment.settings
    record = RunRecord(out, "reproduce", {"parts": chosen, "settings": settings, "notes": list(experiment.notes)})
    record.write()
    sections: list[Section] = []
    for part in chosen:
        section = replace(PARTS[part](experiment, out), settings=settings)
        sections.append(section)
        # Before the files are written: a disk may be full by now.
        if each is not None:
            each(section)
        write_section(section, out)
        _report(out, settings, experiment.notes)
    record.write(finished=True)
    return sections


def _report(out: Path, settings: dict, notes: Sequence[str]) -> None:
    """Write the report; called after every part, so that it covers what is finished."""
    found = [read_section(part, out, settings) for part in PARTS]
    write_report([section for section in found if section is not None], out, notes)

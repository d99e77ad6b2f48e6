"""The page with the reproduction starts with the summary of its claims, as the report writes it."""

from scripts import ROOT

from adamerge.experiments.csv_tables import read_table
from adamerge.experiments.reproduce.claims import Claim
from adamerge.experiments.reproduce.report import opening
from adamerge.experiments.reproduce.section import Section

NAME = "vit_tiny_patch16_224"


def test_the_page_starts_with_the_summary_of_its_claims():
    text = (ROOT / "benchmarks" / "results" / f"reproduce-{NAME}" / "claims.csv").read_text(encoding="utf-8")
    rows = [{name: value for name, value in row.items() if name != "part"} for row in read_table(text)]
    claims = tuple(Claim(**row) for row in rows)  # pyright: ignore[reportArgumentType]
    page = (ROOT / "docs" / f"reproduction-{NAME}.md").read_text(encoding="utf-8")
    assert opening([Section("all", "All parts", claims=claims)]) in page

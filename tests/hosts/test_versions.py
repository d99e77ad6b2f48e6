"""Both generations of transformers, each in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.50.*", "4.57.*", "5.0.*", "5.*"])
def test_the_zoo_keeps_its_contract_in_every_generation_of_transformers(version):
    """Needs a package index."""
    script = ROOT / "benchmarks" / "transformers_versions.sh"
    done = subprocess.run(
        ["bash", str(script), version], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and " failed" not in done.stdout

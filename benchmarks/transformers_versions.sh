#!/usr/bin/env bash
# The contract over the zoo and the tests of transformers, with each version of transformers given (4.50, 4.57, 5.0 and
# the newest 5.x by default).  Each gets a small environment of its own, which sees all else in the one it is called from:
#   benchmarks/transformers_versions.sh [version ...]
set -euo pipefail
cd "$(dirname "$0")/.."
base=${PYTHON:-.venv/bin/python}
versions=("$@")
if [ $# -eq 0 ]; then versions=("4.50.*" "4.57.*" "5.0.*" "5.*"); fi
for version in "${versions[@]}"; do
    home=".venv/transformers-${version//[^0-9.]/}"
    test -x "$home/bin/python" || "$base" -m venv "$home"
    "$home/bin/python" -m pip install --quiet "transformers==$version"
    # What the environment does not have itself comes from the one it was made from.
    "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
        > "$("$home/bin/python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
    PYTHONPATH=src "$home/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    PYTHONPATH=src "$home/bin/python" -m pytest -p no:cacheprovider -q \
        tests/hosts/test_zoo.py tests/hosts/test_transformers.py -k transformers
done

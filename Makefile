# Everything a fresh machine with Python >= 3.10 needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test tests lint slow gpu clean

demo: .venv/installed
	$(BIN)/adamerge demo

# pyright uses one processor; the tests use the others meanwhile.  If either fails, so does this.
test: .venv/installed
	$(MAKE) --jobs=2 lint tests

tests: .venv/installed
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# Needs a CUDA device. One process: tests of memory and of CUDA graphs want the device for themselves.
gpu: .venv/installed
	$(BIN)/python -m pytest -m 'slow or not slow' tests/runtime/triton tests/patching/test_cuda_*.py tests/hosts/test_cuda_zoo.py
	$(BIN)/python benchmarks/gpu_load.py --seconds 60
	$(BIN)/python benchmarks/gpu_load.py --seconds 60 --method dymu

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv adamerge-demo

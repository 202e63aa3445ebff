# make test   everything CI checks: lint, types, tests     make run   see it at work (no GPU, no data)
# make docs   the documentation as a site, in site/
# All set up .venv by themselves from Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
# where it is set, each of some hundred processes that the tests start would compile PyTorch and transformers anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test run docs lint format bench clean

test: lint
	$(BIN)/python -m pytest -n auto --dist loadgroup

run: .venv/installed
	$(BIN)/ccq demo

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python benchmarks/operator_cpu.py

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ccq needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@# torchao says four lines whenever transformers is imported beside it: it lies aside, where one test looks
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --constraint constraints.txt --target .venv/aside torchao
	touch $@

clean:
	rm -rf site .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

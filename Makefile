# Two commands: `make demo` shows what this is for, `make test` checks all of it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
DEVELOP := .venv/develop
# With the constraints: an unpinned torch would be another torch, and gigabytes.
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup
BENCHMARKS := $(wildcard $(patsubst %,benchmarks/%.py,scan overhead trace guarded snapshot survival recovery checkpoint stable clip data preflight integrations record accuracy patches))

.PHONY: demo test check bench docs prove gallery clean

demo: $(INSTALLED)
	@$(BIN)/python examples/demo/demo.py

test: check
	$(PYTEST)

check: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(DEVELOP)
	@for each in $(BENCHMARKS); do echo "== $$each"; $(BIN)/python $$each || exit 1; done

# The site, into site/: reports are recorded again, API and options are written from the code, all
# snippets and commands are run, all links followed.
docs: $(DEVELOP)
	$(BIN)/python docs/record.py
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict
	$(PYTEST) tests/docs
	@echo "The first page is site/index.html."

# Real programs on other people's libraries, in an environment of their own: half an hour.
gallery: .venv-gallery/installed
	.venv-gallery/bin/python gallery/run.py

.venv-gallery/installed: pyproject.toml constraints.txt gallery/requirements.txt
	@echo "Setting up .venv-gallery, with some twenty libraries ..."
	@$(PYTHON) -m venv .venv-gallery
	@.venv-gallery/bin/pip install --quiet --constraint constraints.txt --editable '.[lightning,hf,ignite]' --requirement gallery/requirements.txt
	@touch $@

# The files with property tests once more, with counts that take many minutes.
prove: $(DEVELOP)
	$(PYTEST) --hypothesis-profile=prove $$(grep -rlE --include='test_*.py' '@given|IS_PROOF' tests)

clean:
	rm -rf .venv .venv-gallery demo-output dist build site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up .venv, which takes a few minutes the first time ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable .
	@touch $@

$(DEVELOP): $(INSTALLED)
	@echo "Installing what the tests need, the frameworks and trackers among it ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

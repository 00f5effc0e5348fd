# make demo   a comparison of two qualities, rendered headless with the small model of demo_model/, on a CPU too; or
#             make demo CHECKPOINT=folder PRESET=FAST_20 PROMPT='{...}' WIDTH=1024 HEIGHT=1024 SEED=0 on a GPU
# make test   every test, the type checker and the linter; with a real ComfyUI where one is found
# make bench  on an NVIDIA GPU: kernels, steps and generations into benchmarks/results/, and the README's tables; or
#             make bench CHECKPOINT=folder with real weights: both subjects at both presets, each quality against stock
# make format the formatter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGE_LINK := build/ideogram4_fusion

.PHONY: help demo test bench lint format clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^# make/,/^$$/s/^# //p' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[headless,test]"
	touch $@

# The type checker must see the pack under its import name, whatever its folder is called.
PACKAGES := __init__.py benchmarks checkpoint comparison demo_model fusion hosts kernels nodes sampling tests
$(PACKAGE_LINK):
	mkdir -p $@
	for part in $(PACKAGES); do ln -sfn ../../$$part $@/$$part; done

# By the environment, so that no quote or dollar sign of a prompt reaches the shell's grammar.
export DEMO_CHECKPOINT := $(value CHECKPOINT)
export DEMO_PROMPT := $(value PROMPT)

demo: $(INSTALLED)
	@$(BIN)/ideogram4-fusion --output output \
	  $(if $(value CHECKPOINT),--checkpoint "$$DEMO_CHECKPOINT") $(if $(value PROMPT),--prompt "$$DEMO_PROMPT") \
	  $(if $(PRESET),--preset $(PRESET)) $(if $(WIDTH),--width $(WIDTH)) $(if $(HEIGHT),--height $(HEIGHT)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(QUALITIES),--qualities $(QUALITIES))

lint: $(INSTALLED) $(PACKAGE_LINK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build && ../$(BIN)/mypy --config-file ../pyproject.toml -p ideogram4_fusion

test: lint
	$(BIN)/python -m pytest -q --ignore tests/comfyui
	PYTHON=$(BIN)/python sh tests/comfyui/run.sh

# GENERATIONS, SIZE and QUALITIES make a trial short.
bench: $(INSTALLED) $(PACKAGE_LINK)
	@PYTHON=$(BIN)/python sh benchmarks/run.sh $(if $(value CHECKPOINT),"$$DEMO_CHECKPOINT" \
	  $(if $(GENERATIONS),--generations $(GENERATIONS)) $(if $(SIZE),--size $(SIZE)) \
	  $(if $(QUALITIES),--qualities $(QUALITIES)))

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build output .cache *.egg-info

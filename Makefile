# Each target sets up what it needs: a .venv with exact versions, and for the tests a Node.js client's packages.
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.stamp
NODE := tests/clients/node/node_modules/.stamp
PART ?=

export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint format bench protos clean

# Starts a whole cluster, asks it a question and for a picture, and stops it; leaves its answers in out/.
demo: $(VENV)
	$(BIN)/omnid demo

test: $(VENV) $(NODE)
	$(BIN)/pytest $(ARGS)

lint: $(VENV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/gen_protos.py --check
	$(BIN)/buf lint protos/omni.binpb --path omni/v1
	$(BIN)/python tools/check_breaking.py

format: $(VENV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# make bench, or one part of it: make bench PART=control|data|engine|start
bench: $(VENV)
	$(BIN)/python -m tools.bench $(if $(PART),--part $(PART))

# Python code and descriptor image of the contract, after a change of protos/omni/v1/*.proto.
protos: $(VENV)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/gen_protos.py

clean:
	rm -rf .venv out tests/clients/node/node_modules

$(VENV): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(NODE): tests/clients/node/package.json tests/clients/node/package-lock.json
	cd tests/clients/node && npm ci --silent --no-audit --no-fund
	touch $@

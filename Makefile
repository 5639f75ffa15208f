# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes its own environment, once.
# While you work, `make check` is the part of `make test` that starts no engine.

PYTHON ?= python3
# Idle workers take tests from busy ones: an engine's tests are few and long, and its scenarios run once for all
# workers. Of `check`, many tests wait for a peer that never answers, so that a third worker finds time on two cores.
PYTEST_ARGS ?= -n 2 --dist worksteal --durations 20
CHECK_ARGS ?= -q -n 3 --dist worksteal
CHECKED_ROOMS = tests/unit tests/property tests/incidents
DEMO_ARGS ?=
LOCK_ARGS ?=
CLEAN_ROOM_ARGS ?=

.DEFAULT_GOAL := help
# The steps share one environment and one terminal.
.NOTPARALLEL:
.PHONY: help demo test check env env-demo lock lint format types docs docs-check clean-room clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: env-demo ## Replay a recorded incident with the light install
	@.venv-demo/bin/kvledger demo $(DEMO_ARGS)

# Cheap checks first, and pytest last, so that its closing line closes the run.
test: lint types docs-check ## Make the full environment, then lint, types, docs and all tests
	.venv/bin/python -m pytest $(PYTEST_ARGS)

# Types are checked beside the tests, many of which wait; what they say is shown at the end.
check: lint docs-check ## Lint, types, docs, and the tests that need no engine: about a minute
	@mkdir -p build
	@.venv/bin/pyright --pythonpath .venv/bin/python > build/types.txt & types=$$!; \
	.venv/bin/python -m pytest $(CHECK_ARGS) $(CHECKED_ROOMS); tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; \
	exit $$((tests | types))

env: ## Make the full environment in .venv
	@$(PYTHON) tools/make_env.py full

env-demo: ## Make the light environment in .venv-demo
	@$(PYTHON) tools/make_env.py light

lock: ## Renew the locks after a change of pyproject.toml; LOCK_ARGS=--upgrade takes the newest versions
	@$(PYTHON) tools/lock.py $(LOCK_ARGS)

lint: env ## Check style and form
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: env ## Write the form that lint checks
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

types: env ## Check types, strictly in ledger/ and connector/
	.venv/bin/pyright --pythonpath .venv/bin/python

docs: env ## Write the pages that are generated from code
	.venv/bin/python tools/docs.py

docs-check: env ## Fail when a generated page and the code disagree
	.venv/bin/python tools/docs.py --check

clean-room: ## As root: run demo and test in a root file system of Debian's packages alone; CLEAN_ROOM_ARGS=--help
	@$(PYTHON) tools/clean_room.py $(CLEAN_ROOM_ARGS)

clean: ## Remove the environments and everything that is made
	rm -rf .venv .venv-demo .venv-uv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

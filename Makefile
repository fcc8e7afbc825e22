PYTHON ?= .venv/bin/python

.PHONY: check docs measures notebooks format test slow processor reliability wheel

check: ## what CI runs: format, lint, types, tests
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright
	$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile
	$(PYTHON) -m tests.other_processor -n auto --maxprocesses 4 --dist loadfile

docs: ## the site in build/docs/site, strictly: needs the extra `docs`
	$(PYTHON) docs/site/build.py

notebooks: ## run the notebooks and keep what they show; minutes
	$(PYTHON) docs/site/notebooks.py

measures: ## the structure in numbers, beside the committed ones; WRITE=--write stores them
	$(PYTHON) -m tests.measures $(WRITE)

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test:
	$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile

slow: ## every test, the long ones too
	$(PYTHON) -m pytest -m ''

processor: ## what depends on the processor, as another kind of processor than this one
	$(PYTHON) -m tests.other_processor -n auto --maxprocesses 4 --dist loadfile

wheel: ## every verb by the installed wheel, outside of the checkout, on each Python that is here; minutes, and a download of PyTorch
	$(PYTHON) -m tests.wheel

reliability: ## the whole rig: kills, crash points, signals, damage; docs/explanation/reliability.md has what it counts
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.reliability

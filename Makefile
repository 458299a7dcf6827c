# The same steps without make: docs/install.md
PYTHON ?= python3
VENV_PYTHON = .venv/bin/python

.PHONY: help lab test notebooks scenes docs bench clean

help:            ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

lab:             ## open the course in JupyterLab (PORT=9000 and LAB_ARGS="--ip=0.0.0.0" are passed on)
	@PORT="$(PORT)" LAB_ARGS="$(LAB_ARGS)" $(PYTHON) .ci/lab.py

test:            ## everything: unit tests, notebooks, scenes, browser, docs
	@$(PYTHON) .ci/test.py

notebooks:       ## run all notebooks again and store their outputs
	@$(PYTHON) .ci/setup.py test
	@$(VENV_PYTHON) .ci/notebooks.py
	@$(VENV_PYTHON) .ci/exercises.py

scenes:          ## render all animations in low quality into media/
	@$(PYTHON) .ci/setup.py test
	@$(VENV_PYTHON) -m animations render --all

docs:            ## build the documentation site into site/; it is read without network
	@$(PYTHON) .ci/docs.py

bench:           ## measure speed and memory against the peers, print the tables, write docs/performance.md (BENCH_ARGS="--quick")
	@$(PYTHON) .ci/setup.py lab
	@$(VENV_PYTHON) -m benchmarks $(BENCH_ARGS)

clean:           ## delete the environment and everything that the programs wrote
	rm -rf .venv benchmarks/venv media site site.part build dist *.egg-info .pytest_cache .hypothesis
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# Two commands set everything up on a bare machine with Python 3.11 or newer:
#   make demo   train and compare on data that comes with the package
#   make test   lint, type-check and test
# and:
#   make docs   build the documentation's site in build/site
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-oldest soak audit lint docs wheel lock clean

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) -e ".[cli]"
	touch $@

$(VENV)/dev.stamp: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) -e ".[dev]"
	touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	$(BIN)/rlsprune run

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n auto -m "not slow"

test-all: lint
	@command -v chromedriver >/dev/null || echo "The report page is not tested in a browser: apt-get install chromium chromium-driver"
	$(PIP_INSTALL) -e ".[dev,benchmarks,ray]"
	$(BIN)/pytest -n auto --cov --cov-report=term
	$(MAKE) wheel

# Wheel and source archive in dist/, checked; then the wheel at work in an environment of its own, away from the source.
wheel: $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[cli]"
	cd "$$(mktemp -d)" && PYTHONPATH= "$(CURDIR)/build/wheel/bin/rlsprune" --version \
		&& PYTHONPATH= "$(CURDIR)/build/wheel/bin/rlsprune" run --epochs 4 --train-images 500 --threads 1 --out run --quiet \
		&& PYTHONPATH= "$(CURDIR)/build/wheel/bin/rlsprune" check run

# The versions of everything that this environment has for the package and its tests: tests/newest.txt.
lock: $(VENV)/dev.stamp
	$(BIN)/python tests/lock.py > tests/newest.txt

docs: $(BIN)/pip
	$(PIP_INSTALL) -e ".[docs,cli,lightning,transformers]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Faults and hostile files in large numbers, and runs that are long.
soak: $(VENV)/dev.stamp
	$(BIN)/pytest -m soak
	RLSPRUNE_FUZZ=1300 $(BIN)/pytest tests/fuzz
	$(PIP_INSTALL) -e ".[fuzz]"
	$(BIN)/python tests/fuzz/guided.py all 60
	$(BIN)/python -m benchmarks.speed.soak_run
	$(BIN)/python -m benchmarks.quality.soak_inverse

# The oldest versions that pyproject.toml allows. Old releases of torch come with several gigabytes of CUDA.
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --disable-pip-version-check -r tests/oldest.txt -e .
	$(VENV)-oldest/bin/pytest -m "not slow" tests/optim tests/prune tests/training tests/statistics tests/io/test_modelfile.py tests/io/test_state.py

# Needs the network: asks which installed versions have known vulnerabilities.
audit: $(VENV)/dev.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --skip-editable

clean:
	rm -rf $(VENV) build .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis

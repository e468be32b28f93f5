# Three commands matter: `make demo`, `make test` and `make bench`. They need only Python >= 3.11, a C++20 compiler
# and pip's index; the rest is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch is pinned: a bare `torch` pulls gigabytes of CUDA.
TORCH := torch==2.13.0

.PHONY: demo test checks lint cpp-test cpp-stress wheel-test wheels aarch64 bench torture docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Before the others: while pip installs these, make compiles.
$(VENV)/.tools: | $(BIN)/python
	$(BIN)/python -m pip install --quiet cmake ninja
	@touch $@

$(VENV)/.torch: | $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --prefer-binary $(TORCH)
	@touch $@

SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find csrc src -type f -not -name '*.pyc' -not -name '_native*')

# Compiled once, whatever is installed from it.
$(VENV)/.wheel: $(SOURCES) | $(VENV)/.tools
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@touch $@

# $(call install,EXTRA): the wheel in dist with what EXTRA needs, in place of one of the same version.
install = $(BIN)/python -m pip install --quiet "$$(echo dist/*.whl)[$(1)]" && \
  $(BIN)/python -m pip install --quiet --force-reinstall --no-deps dist/*.whl

$(VENV)/.demo: $(VENV)/.torch $(VENV)/.wheel
	$(call install,train)
	@touch $@

$(VENV)/.test: $(VENV)/.torch $(VENV)/.wheel
	$(call install,dev)
	@touch $@

# In a folder of its own, for the processes of tests/device/test_device_kernels.py alone: imported after TensorFlow, Triton
# crashes a process, and torch imports it where it finds it. Elsewhere there is no wheel, and those tests are skipped.
$(VENV)/.triton: | $(VENV)/.tools
	case "$$(uname -sm)" in "Linux x86_64") \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton 'triton==3.7.*';; esac
	@touch $@

# FBGEMM's wheel names no torch, but fits only the one pinned above.
$(VENV)/.bench: $(VENV)/.torch $(VENV)/.wheel
	$(call install,bench)
	$(BIN)/python -m pip install --quiet --no-deps fbgemm-gpu-cpu==1.8.0
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/bunkbed demo

# Three processes of pytest on two cores: two of them left a third of the processors' time unused, in waits and sleeps.
test:
	$(MAKE) --jobs 2 --output-sync=target checks
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 2 --durations 30 --durations-min 5

checks: lint cpp-test wheel-test $(VENV)/.triton

# In a fresh virtual environment, without a compiler.
wheel-test: $(VENV)/.test
	$(BIN)/python packaging/check_wheel.py dist

# A release: the source distribution, a wheel built from it, and the wheels of every processor and CPython (build/wheels).
# Debian's cross compiler compiles for another processor: apt-get install g++-aarch64-linux-gnu qemu-user-static.
$(VENV)/.wheels: $(VENV)/.test
	$(BIN)/python -m pip install --quiet build nanobind wheel
	@touch $@

CROSS = $(BIN)/python packaging/cross_wheel.py
wheels: $(VENV)/.wheels
	rm -rf build/release
	$(BIN)/python -m build --outdir build/release .
	$(CROSS) build/release/*.whl

# The bits of rows, tables of older releases and the C++ tests on aarch64, under QEMU's emulation: three quarters of an hour.
aarch64: $(VENV)/.wheels
	$(CROSS) --machine aarch64 --tests dist/*.whl

# The pages as a site in build/site, its search included: `python3 -m http.server -d build/site`. Also a test, tests/docs/test_site.py.
$(VENV)/.docs: $(VENV)/.wheel
	$(call install,docs)
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every peer in one run, about 40 minutes on two idle cores; needs 40 GB of disk, and root for the memory limits.
# `make bench BENCH=--quick` takes smaller tables and fewer turns, `BENCH="adam lookup"` runs those cases alone.
BENCH ?=
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(BENCH)

# Power loss, kill -9, failing disks, corruption, fuzzing: the long form, some tens of minutes on two cores.
# `make torture TORTURE="powerloss --size 0.1"` runs one part, smaller.
TORTURE ?=
torture: $(VENV)/.test
	$(BIN)/python -m torture $(TORTURE)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.h' -o -name '*.cc')
	$(BIN)/python -c "import importlib.util as u, pathlib, shutil; \
	  shutil.copy(pathlib.Path(u.find_spec('bunkbed._native').origin).with_name('_native.pyi'), 'src/bunkbed')"
	$(BIN)/mypy
	$(BIN)/python packaging/thread_safety.py

cpp-test: | $(VENV)/.tools
	$(BIN)/cmake -S . -B build/cpp-test -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DBUNKBED_BUILD_PYTHON=OFF -DBUNKBED_BUILD_TESTS=ON \
	  -DBUNKBED_SANITIZE=address,undefined
	$(BIN)/cmake --build build/cpp-test
	build/cpp-test/bunkbed_tests

# Threads of random calls on every kind of table, with both ways of reading, under both sanitizers: an hour.
# `make cpp-stress SECONDS=10` runs each of the 36 combinations for so many seconds.
SECONDS ?= 100
cpp-stress: $(VENV)/.test
	$(BIN)/python -m torture.sanitizers $(SECONDS)

clean:
	rm -rf build dist $(VENV)

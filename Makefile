# Everything is installed into .venv: by `make install` what serving needs, by `make build` what the other targets need
# besides; `make extras` installs what few tests need into .venv-extras.
#
#   make install                                 the command `fastserve`: . .venv/bin/activate
#   make serve [ARGS="--http 127.0.0.1:9000"]    the same, and the demo repository, served
#   make test  [ARGS="tests/net -k pipeline"]   the suite, two processes a core (JOBS=0: in one)
#   make test-fast                               without servers and workers, a fifth of the examples
#   make test-extras                             what needs TensorFlow, XGBoost, Node.js, Chromium, ..., which it installs
#   make test-ray                                remote workers on a Ray cluster of three nodes, all on this machine
#   make docs                                    the documentation as a site, in build/site
#   make build [TORCH_INDEX=URL]                 torch's CPU build from that index; any: whatever pip finds, CUDA too
#   make wheels PYTHONS="python3.10 python3.13"   a source distribution, and of it a wheel for each, tried in an environment
#   make sbom                                    a CycloneDX bill of materials beside each wheel of dist/
#   make bench [ARGS="--repeats 3"]              microbenchmarks, the table against the reference server, text against transformers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
ARGS ?=
JOBS ?= auto
PYTHONS ?= $(PYTHON)
TORCH_INDEX ?=
# JOBS processes of a suite, or $2 a core; at most $1.
forks = $(shell n=$(or $(filter-out auto,$(JOBS)),$$(($2 * $$(nproc)))); echo $$((n < $1 ? n : $1)))

CHECKED := build/.compiler
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
TORCH := $(VENV)/.torch
EXTENSIONS := $(VENV)/.extensions
PROTOS := $(VENV)/.protos
EXT_SOURCES := $(wildcard ext/*.pyx ext/*.pxd ext/include/*.h)
PROTO_SOURCES := $(shell find protos -name '*.proto' 2>/dev/null)
DEBUG_TREE := build/debug/tree
EXTRAS := .venv-extras

.DELETE_ON_ERROR:
# Recipes share an environment and a folder of products; those that take long use all cores by themselves.
.NOTPARALLEL:
.PHONY: build torch FORCE install serve test test-fast test-gpu extras test-extras test-ray docs lint format bench wheel sdist wheels sbom debug torture differential clean

build: $(INSTALLED) $(TORCH) $(EXTENSIONS) $(PROTOS)

# First of all, in a sentence: what is missing to compile with.
$(CHECKED): tools/check_compiler.py
	@$(PYTHON) tools/check_compiler.py
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "fastserve cannot be built: Python's venv is missing (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@mkdir -p build && touch $@

# What the server imports, and what its modules are compiled with; these are left to the next rule but three, which
# rebuilds only what changed. Python compiles what it imports, a third of what is installed.
$(RUNTIME): pyproject.toml | $(CHECKED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile $$($(BIN)/python tools/requirements.py requires)
	FASTSERVE_EXT=none $(PIP) --no-compile --no-build-isolation -e .
	@touch $@

# Besides: what tests, lint and wheels need.
$(INSTALLED): $(RUNTIME) tests/clients.txt
	FASTSERVE_EXT=none $(PIP) --no-build-isolation -e '.[test,lint,wheel]'
	$(PIP) --no-deps -r tests/clients.txt
	@touch $@

# A CPU build or none: tests and benchmarks need it, the demo does not.
$(TORCH): tools/install_torch.py $(INSTALLED) $(if $(TORCH_INDEX),FORCE)
	$(BIN)/python tools/install_torch.py $(TORCH_INDEX)
	@touch $@

FORCE:

# The suite needs one, and takes what there is.
torch: build
	@$(BIN)/python tools/install_torch.py any

$(EXTENSIONS): $(EXT_SOURCES) setup.py | $(RUNTIME)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(PROTOS): $(PROTO_SOURCES) setup.py tools/write_triton_structs.py | $(RUNTIME)
	$(BIN)/python setup.py -q protos
	@touch $@

install: $(RUNTIME) $(EXTENSIONS) $(PROTOS)

serve: install
	@exec $(BIN)/fastserve serve demo $(ARGS)

# The tests are collected once, and run in forked processes (tests/forks.py). A third of their time is waiting, for
# workers that start and servers that stop: two processes a core. Past four there is little to gain. What fails among
# others is run again alone, and a race is named as one (tests/again.py).
test: build torch
	$(BIN)/python -m pytest -p tests.again -p tests.forks --forks $(call forks,4,2) -rs $(ARGS)

test-fast: build torch
	$(BIN)/python -m pytest -p tests.forks --forks $(call forks,4,1) --no-processes --hypothesis-profile fast $(ARGS)

# What can only be shown on a CUDA device; elsewhere each says why it was skipped.
test-gpu: build torch
	$(BIN)/python -m pytest -m gpu -rs tests/gpu $(ARGS)

extras:
	@$(PYTHON) tools/install_extras.py $(EXTRAS)

# Here a skip fails, unless tests/skips.py has it on its list, or `make extras` could not install what it needs.
test-extras: build torch extras
	FASTSERVE_GRPC_JS=$(CURDIR)/$(EXTRAS)/grpc-js PATH="$$PATH:$(CURDIR)/$(EXTRAS)/bin" \
		$(BIN)/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json \
		tests/net/grpc/test_interop_js.py tests/server/observability/test_console.py tests/server/listeners/test_one_port.py \
		tests/server/observability/test_openapi_conformance.py tests/deploy/test_systemd.py tests/deploy/test_proxies.py
	$(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json \
		tests/backends/frameworks/test_tensorflow.py
	PATH="$$PATH:$(CURDIR)/$(EXTRAS)/bin" $(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json \
		tests/recipes tests/cli/test_serve_one.py::test_xgboost \
		-k "xgboost or tensorflow or fastapi or notebook or clients"
	$(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json \
		tests/backends/tabular tests/examples/test_tabular.py tests/repository/test_storage.py \
		tests/server/models/test_storage.py tests/dialects/openai/test_tools_langchain.py \
		tests/dialects/openai/test_litellm.py
	$(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json tests/test_site.py
	PATH="$$PATH:$(CURDIR)/$(EXTRAS)/bin" $(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips \
		--extras $(EXTRAS)/extras.json tests/deploy/test_chart.py

# Two minutes; its nodes end with it.
test-ray: build extras
	$(EXTRAS)/bin/python -m pytest -p tests.again -p tests.skips --extras $(EXTRAS)/extras.json tests/workers/remote/test_ray.py

# To build/site; a link that leads nowhere ends it.
docs: extras
	NO_MKDOCS_2_WARNING=1 $(EXTRAS)/bin/python tools/build_docs.py

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(BIN)/python tools/check_stubs.py
	$(BIN)/python tools/check_lengths.py
	$(BIN)/python tools/check_structure.py

format: build
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: build torch
	$(BIN)/python -m pytest bench -o python_files='bench_*.py' --benchmark-enable \
		--benchmark-columns=median,iqr,ops,rounds --benchmark-sort=name
	$(BIN)/python -m bench.load $(ARGS)
	$(BIN)/python -m bench.text.engine fastserve/demo/scribe/1
	$(BIN)/python -m bench.text.served fastserve/demo/scribe/1

# For any system with glibc 2.28 (RHEL 8, Debian 10, Ubuntu 20.04) or newer: auditwheel refuses what is not.
# Files of an earlier build that the tree no longer has would travel in the wheel.
wheel: build
	rm -rf build/wheel
	find build/portable -path '*/fastserve/*' -type f ! -name '*.so' ! -name '*.o' -delete 2>/dev/null || true
	FASTSERVE_PORTABLE=1 $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps \
		-w build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -z 9 --plat manylinux_2_28_$$(uname -m) -w dist build/wheel/fastserve-*.whl
	$(BIN)/python tools/check_wheel.py dist

sdist: $(RUNTIME)
	rm -f dist/fastserve-*.tar.gz
	$(BIN)/python setup.py -q sdist

# As cibuildwheel does in containers, with the Pythons and the system that are here.
wheels: sdist $(INSTALLED) $(PROTOS)
	$(BIN)/python tools/build_wheels.py dist/fastserve-*.tar.gz $(PYTHONS)

sbom: $(RUNTIME)
	$(BIN)/python tools/write_sbom.py dist

# The sanitizers' build lives in its own tree, so that the ordinary modules stay as they are.
# libstdc++ is preloaded too: without it the sanitizer cannot find the exception throwing it wraps.
debug: build
	rm -rf $(DEBUG_TREE)
	FASTSERVE_DEBUG=1 $(BIN)/python setup.py -q build --build-base build/debug --build-lib $(DEBUG_TREE)
	cp -r tests bench ext pyproject.toml $(DEBUG_TREE)
	cd $(DEBUG_TREE) && LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(CURDIR)/$(BIN)/python -m pytest tests/ext tests/fuzz/test_parsers.py --timeout 600 -o hang_s=2400 $(ARGS)

# TRITON: a command that starts one, given REPOSITORY --http PORT --grpc PORT --metrics PORT.
differential: build
	FASTSERVE_TRITON="$(TRITON)" $(BIN)/python -m pytest -rs tests/differential --timeout 300 $(ARGS)

# Two at a time, the files with most cases first. What compares times (`alone`) waits until nothing else runs.
torture: build torch
	$(BIN)/python -m pytest -p tests.forks --forks $(call forks,2,1) -m "torture or hypothesis" \
		--timeout 3600 -o hang_s=7200 --hypothesis-profile torture --durations 60 --durations-min 10 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info fastserve/_ext/*.so fastserve/protos/*.binpb fastserve/protos/model_config.py
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks .bench
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

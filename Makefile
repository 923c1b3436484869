# make serve   set up .venv and start the server with the default model on 127.0.0.1:8000
# make test    set up .venv, then lint, types and all tests
#
# Needs Python 3.11 or newer (with venv) and make. A C compiler is optional. Both targets may be repeated at once: what
# is already installed is not looked at again until a lock file or pyproject.toml changes.
#
#   make serve MODEL=gemma3-270m ARGS="--port 9000 --max-num-seqs 16"
#   make serve PYTHON=/opt/python3.12/bin/python3     choose the interpreter
#   make test TESTS=tests/scheduler                   run a part of the tests
#   make test JOBS=0                                  run them one after another in one process

.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PYTHON ?=
MODEL ?=
ARGS ?=
TESTS ?=
JOBS ?= 2

.PHONY: help setup setup-dev serve chat doctor lint types test clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

serve: setup
	@exec $(PY) -m aengine.cli serve $(MODEL) $(ARGS)

chat: setup
	@exec $(PY) -m aengine.cli chat $(MODEL) $(ARGS)

doctor: setup
	@exec $(PY) -m aengine.cli doctor $(ARGS)

lint: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup-dev
	$(PY) -m mypy --strict aengine

test: lint types
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Every Python on PATH is tried by running it: a version manager's shim may exist and yet run nothing, and a
# distribution may ship Python without the parts that venv needs.
$(PY):
	@set -eu; \
	names="$(PYTHON)"; [ -n "$$names" ] || names="python3.12 python3.11 python3 python"; \
	seen=; found=; \
	IFS=:; set -- $$PATH; IFS=' '; \
	for name in $$names; do \
	  case "$$name" in */*) files="$$name" ;; *) files=; for dir in "$$@"; do files="$$files $$dir/$$name"; done ;; esac; \
	  for file in $$files; do \
	    [ -x "$$file" ] || continue; \
	    version=$$("$$file" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	    if ! "$$file" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	      seen="$$seen\n  $$file is Python $$version, older than 3.11"; continue; fi; \
	    if ! "$$file" -c 'import ensurepip, venv' 2>/dev/null; then \
	      seen="$$seen\n  $$file is Python $$version without venv (on Debian or Ubuntu: apt-get install python$$version-venv)"; \
	      continue; fi; \
	    found="$$file"; break 2; \
	  done; \
	done; \
	if [ -z "$$found" ]; then \
	  printf 'No usable Python found: aengine needs Python 3.11 or newer, with venv.%b\n' "$$seen" >&2; \
	  printf 'Install one, or name it: make serve PYTHON=/path/to/python3.12\n' >&2; exit 1; \
	fi; \
	printf 'Creating %s with %s\n' "$(VENV)" "$$found"; \
	"$$found" -m venv "$(VENV)"

# setuptools comes from the lock, so the editable install needs no isolated build and no further download.
$(VENV)/.installed: requirements.lock pyproject.toml | $(PY)
	$(PIP) install -r requirements.lock
	$(PIP) install --no-build-isolation --no-deps --quiet --config-settings editable_mode=compat --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock requirements-source.lock $(VENV)/.installed
	$(PIP) install -r requirements-dev.lock -c requirements.lock
	$(PIP) install --no-deps -r requirements-source.lock
	@touch $@

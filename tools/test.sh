#!/usr/bin/env bash
# The whole check on a fresh machine: environment, lint, types, tests. `tools/test.sh ARGS` passes ARGS on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/make_venv.sh test
ruff check .
ruff format --check .
pyright
# Two workers, whole files each, so that fixtures of a module are built once; the longest begins first.
pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@"

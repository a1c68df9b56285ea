#!/usr/bin/env bash
# The whole check on a fresh machine: environment, lint, types, tests. `tools/test.sh ARGS` passes ARGS on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/make_venv.sh
ruff check .
ruff format --check .
pyright
pytest "$@"

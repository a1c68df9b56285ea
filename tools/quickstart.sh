#!/usr/bin/env bash
# From a clone to a result: makes .venv, then trains, profiles, evaluates and decides on 16 host devices, and ends
# with a table and a report. It can be stopped anywhere: the same command goes on. `tools/quickstart.sh ARGS`
# passes ARGS on, such as --run_dir=PATH or --dry_run.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/make_venv.sh ''
exec python -m pipeline.run --gin_file=gin/quickstart.gin "$@"

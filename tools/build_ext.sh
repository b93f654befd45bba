#!/usr/bin/env bash
# Rebuild some compiled modules in place: tools/build_ext.sh json_reader flatten
set -eu
cd "$(dirname "$0")/.."
export FASTSERVE_EXT
FASTSERVE_EXT=$(IFS=,; echo "$*")
exec "${PYTHON:-.venv/bin/python}" setup.py -q build_ext --inplace --build-temp "build/temp-${FASTSERVE_EXT:-all}"

#!/bin/sh
# Puts @grpc/grpc-js into FOLDER, for tests/net/grpc/test_interop_js.py. Needs node and npm.
#
#   tools/install_grpc_js.sh FOLDER && FASTSERVE_GRPC_JS=FOLDER make test ARGS=tests/net/grpc/test_interop_js.py
set -eu
VERSION=1.14.7
[ $# = 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
command -v node npm >/dev/null || { echo "node and npm are needed (Debian and Ubuntu: apt install nodejs npm)" >&2; exit 1; }
mkdir -p "$1"
npm install --prefix "$1" --no-save --no-audit --no-fund --ignore-scripts "@grpc/grpc-js@$VERSION"

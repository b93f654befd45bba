#!/usr/bin/env bash
# Builds h2spec, the conformance tests of HTTP/2, from its source and Debian's Go packages alone:
#
#   apt-get install golang-go golang-github-fatih-color-dev golang-github-spf13-cobra-dev golang-golang-x-net-dev
#   tools/build_h2spec.sh SOURCE OUTPUT      SOURCE: a checkout of github.com/summerwind/h2spec
#   FASTSERVE_H2SPEC=OUTPUT make test ARGS=tests/net/http2/test_h2spec.py
set -eu
source=$(cd "$1" && pwd)
output=$(realpath -m "$2")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
# Its go.mod asks for versions of 2016 and 2017; Debian's are in a GOPATH, where modules are not looked at.
mkdir -p "$tree/src/github.com/summerwind"
cp -r "$source" "$tree/src/github.com/summerwind/h2spec"
cd "$tree/src/github.com/summerwind/h2spec"
GO111MODULE=off GOFLAGS='' GOPATH="$tree:/usr/share/gocode" go build -o "$output" ./cmd/h2spec

#!/usr/bin/env bash
# Run real clients against `ingle serve`: tests/clients/run.sh [--list] [--keep] [NAME...]
# Needs a Python with the project's dev extra. Set PYTHON to use a different one than python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tests.clients.run "$@"

#!/usr/bin/env bash
# Proves model folders against transformers; ends in PASS or "FAIL … next: COMMAND". See SKILL.md.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")
root=$here/../../..
export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
(($#)) && [[ $1 != -* ]] || { echo "FAIL no folder is given  next: less $here/SKILL.md"; exit 2; }
"$root/dev" build marrow test_train > /dev/null || { echo "FAIL the build  next: ./dev build marrow test_train"; exit 1; }
exec "$root/.venv/bin/python" "$here/proof.py" "$@"

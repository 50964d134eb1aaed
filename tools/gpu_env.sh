# Sourced: lets programs built here find torch's and CUDA's libraries in this machine's own torch.
PYTHON=${PYTHON:-python3}
TORCH=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(torch.__file__))') || {
  echo "FAIL no torch in $PYTHON  next: PYTHON=/path/to/python with torch 2.11"
  exit 1
}
LD_LIBRARY_PATH="$TORCH/lib:$(printf '%s:' "$TORCH"/../nvidia/*/lib)$BUNDLE/lib"
export LD_LIBRARY_PATH OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
for packed in "$BUNDLE"/bin/*.gz; do
  [[ ! -e $packed ]] || gunzip "$packed"
done

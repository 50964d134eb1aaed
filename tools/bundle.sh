#!/usr/bin/env bash
# tools/bundle.sh [PROGRAM...]: gathers build-gpu/marrow, its tests, configs and the small libraries that a machine with a GPU and
# torch 2.11 but without this checkout's packages lacks. At most 64 MiB in bundle/.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf bundle && mkdir -p bundle/lib bundle/bin
programs=("$@")
# The other tests have nothing to do on a GPU.
(($#)) || programs=(marrow test_{ops,models,parallel,pipeline,mpi,mesh} bench_{ops,nvlink})
for name in "${programs[@]}"; do
  program=build-gpu/$name
  strip -o "bundle/bin/$name" "$program"
  # torch, CUDA and glibc are on the other machine; everything else comes along.
  ldd "$program" | awk '$3 ~ /^\// {print $3}' |
    grep -vE '/\.venv/|/(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux[^/]*|libcuda|libutil)\.so' |
    # Open MPI and what it loads must be of the mpirun there.
    grep -vE '/lib(mpi|open-rte|open-pal|hwloc|event|pmix|udev|nl|ltdl|pciaccess|xml2|OpenCL|cap)[^/]*\.so' >> bundle/lib.txt || true
done
sort -u bundle/lib.txt | xargs -r cp -L -t bundle/lib && rm bundle/lib.txt
cp -r configs bundle/
mkdir -p bundle/tools && cp tools/gpu_{env,rank}.sh bundle/tools/
cp build-gpu/libsync_counter.so bundle/lib/
cp tools/run_gpu_tests.sh tests/gpu/count_syncs.sh bundle/
gzip bundle/bin/*  # a quarter; gpu_env.sh unpacks them
size=$(du -sm bundle | cut -f 1)
((size <= 64)) || { echo "bundle/ has $size MiB, at most 64 fit: $(du -m bundle/bin/* | sort -rn | head -n 3 | tr '\n' ' ')"; exit 1; }

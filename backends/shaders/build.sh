#!/bin/sh
# Builds the SPIR-V of every kernel in this folder, into this folder or the one given.
# Needs glslangValidator (Debian: glslang-tools).
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
out=${1:-$here}
for source in "$here"/*.comp; do
    name=$(basename -- "$source" .comp)
    # --quiet keeps the file name of the source out of the output of a good build.
    glslangValidator --quiet -V --target-env vulkan1.1 -o "$out/$name.spv" "$source"
done

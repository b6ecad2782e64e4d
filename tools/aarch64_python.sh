#!/usr/bin/env bash
# Put an aarch64 Python with torch in a folder, on Debian, for `make release` on another processor: it runs under qemu.
# Usage: tools/aarch64_python.sh FOLDER, after `apt-get install qemu-user-static`.
set -euo pipefail
mkdir -p "$1/packages"
folder=$(realpath "$1")
dpkg --add-architecture arm64
apt-get update --quiet=2
names="python3.11 python3.11-minimal libpython3.11-stdlib libpython3.11-minimal libc6 libgcc-s1 libstdc++6 libgomp1
  zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1"
cd "$folder/packages"
# shellcheck disable=SC2086
apt-get download --quiet=2 $(printf "%s:arm64 " $names)
for each in *.deb; do dpkg -x "$each" "$folder"; done
# the wheels of torch after 2.10.0 need CUDA's libraries on aarch64; this one has 146 MB
install() {
  python3 -m pip install --quiet --target "$folder/usr/lib/python3/dist-packages" --upgrade --only-binary=:all: \
    --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 "$@"
}
install --no-deps torch==2.10.0
install numpy filelock fsspec jinja2 networkx setuptools sympy typing-extensions # pip reads torch's for this processor
echo "export FUSEDOPS_AARCH64_PYTHON='-L $folder $folder/usr/bin/python3.11'"

#!/usr/bin/env bash
# Writes build/gpu-bundle.tar.gz: all that a build and scripts/gpu_check.sh need on a machine without a network that has a GPU, a
# compiler, CMake, ninja and a Python with torch. It is the sources (with changes that are not committed yet) and, in
# .deps/debian, where CMake looks for them, the headers and libraries that come from Debian packages elsewhere.
#   scripts/gpu_bundle.sh [FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
MOST_MIB=64

fail() { printf '[gpu-bundle] error: %s\n' "$*" >&2; exit 1; }

bundle=${1:-build/gpu-bundle.tar.gz}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
top=$folder/lockstep-gpu
own=$top/.deps/debian/usr
libraries=$own/lib/x86_64-linux-gnu
mkdir -p "$libraries" "$(dirname "$bundle")"

git rev-parse --git-dir >/dev/null 2>&1 || fail "$PWD is not a git checkout: the sources of a bundle are the files that git knows"
changed=$(git stash create)
git archive "${changed:-HEAD}" | tar -x -C "$top"
printf '%s%s\n' "$(git rev-parse HEAD)" "${changed:+ with changes that are not committed}" > "$top/.deps/revision.txt"

# The files of a package: of the installed one, else of one that is fetched and unpacked.
files_of() {
  if [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; then
    dpkg-query -L "$1" | sed 's|^|/\t|'
  else
    mkdir -p "$folder/fetched/$1"
    (cd "$folder/fetched/$1" && apt-get download -qq "$1" >&2 && dpkg -x ./*.deb .) ||
      fail "package $1 is neither installed nor to be had: run scripts/setup.sh first"
    (cd "$folder/fetched/$1" && find . \( -type f -o -type l \) | sed "s|^[.]|$PWD\t|")
  fi
}

# Copies one file as it lies below /usr, but without the folder that Debian has for each kind of processor among the headers:
# who finds zlib.h or openssl/ssl.h finds zconf.h and openssl/configuration.h beside it.
take() {
  local from=$1 path=$2 to
  to=$own/${path#/usr/}
  to=${to/include\/x86_64-linux-gnu\//include/}
  [ -d "$from" ] && [ ! -L "$from" ] && return
  mkdir -p "$(dirname "$to")"
  cp -P "$from" "$to"
}

packages=$(grep -E '^(lib|nlohmann|zlib)' deps/apt.txt | grep -v '^libbenchmark')
roots=()
for package in $packages; do
  while IFS=$'\t' read -r root path; do
    case "$path" in
      /usr/include/* | /usr/lib/*/cmake/* | /usr/share/cmake/* | */libgtest*.a | */libgmock*.a | /usr/lib/*.so)
        take "${root%/}$path" "$path" ;;
    esac
  done < <(files_of "$package")
  printf '%s %s\n' "$package" "$(dpkg-query -W -f '${Version}' "$package" 2>/dev/null)" >> "$own/../packages.txt"
done

# The libraries that lib*.so points to, as files beside it: under their own names, which CMake's files know, and under the
# names that programs look for.
for link in "$libraries"/*.so; do
  [ -L "$link" ] || continue
  name=$(basename "$(readlink "$link")")
  place=
  for place in /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu .deps/debian/usr/lib/x86_64-linux-gnu .deps/debian/lib/x86_64-linux-gnu; do
    [ -f "$place/$name" ] && break
  done
  [ -f "$place/$name" ] || fail "no $name here, which $(basename "$link") points to: run scripts/setup.sh first"
  real=$(readlink -f "$place/$name")
  cp "$real" "$libraries/"
  soname=$(LC_ALL=C readelf -d "$real" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
  [ "$soname" = "$(basename "$real")" ] || ln -sf "$(basename "$real")" "$libraries/$soname"
  ln -sfn "$soname" "$link"
done
# What those need in turn and no system is sure to have.
for library in "$libraries"/*.so; do
  for need in $(LC_ALL=C readelf -d "$library" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p'); do
    case "$need" in libc.so* | libm.so* | libstdc++.so* | libgcc_s.so* | libdl.so* | libpthread.so* | ld-linux*) continue ;; esac
    [ -e "$libraries/$need" ] || fail "$(basename "$library") needs $need, which no package in deps/apt.txt brings"
  done
done
dangling=$(find "$own" -xtype l)
[ -z "$dangling" ] || fail "links to nothing in the bundle: $dangling"

tar -C "$folder" --owner=0 --group=0 -czf "$bundle" lockstep-gpu
bytes=$(stat -c %s "$bundle")
[ "$bytes" -lt $((MOST_MIB << 20)) ] || fail "$bundle has $((bytes >> 20)) MiB, more than the $MOST_MIB that can be brought"
echo "[gpu-bundle] $bundle: $((bytes >> 10)) KiB; there: tar -xzf $(basename "$bundle") && lockstep-gpu/scripts/gpu_check.sh"

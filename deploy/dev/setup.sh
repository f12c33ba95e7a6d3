#!/usr/bin/env bash
# Makes everything that tests and demo need: Debian packages, .venv, the test model. Run it as often as you like: each
# step leaves a stamp with the digest of what it was made from, so a second run does nothing and a killed one resumes.
set -euo pipefail
cd "$(dirname "$0")/../.."

HERE=deploy/dev
VENV=.venv
MODEL=.cache/models/SmolLM2-135M-Instruct
LOG=.cache/setup.log

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# step NAME DIGEST STAMP COMMAND...: run the command, its output into the log, unless the stamp holds the digest.
step() {
  local name=$1 digest=$2 stamp=$3 began=$SECONDS
  shift 3
  [[ -f $stamp && $(<"$stamp") == "$digest" ]] && return
  printf 'setup: %-28s ' "$name"
  printf '\n=== %s: %s\n' "$name" "$*" >>"$LOG"
  if ! "$@" >>"$LOG" 2>&1 </dev/null; then
    printf 'FAILED after %d s; the end of %s:\n' $((SECONDS - began)) "$LOG"
    tail -n 15 "$LOG" >&2
    printf 'setup: what was finished is kept; run it again when the cause is gone\n' >&2
    return 1
  fi
  mkdir -p "$(dirname "$stamp")"
  printf '%s\n' "$digest" >"$stamp"
  printf '%4d s\n' $((SECONDS - began))
}

digest_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed; none of \$PYTHON, python3.11, python3.12, python3.13, python3 is"
}

# Debian's names of what is missing. Asked for by what is used, not by package, so other sources of the same thing count.
missing_packages() {
  local libraries library
  libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  for library in libibverbs librdmacm libnuma; do # Mooncake's shared libraries load them
    grep -q "$library\.so\.1 " <<<"$libraries" || echo "${library}1"
  done
  command -v redis-server >/dev/null || echo redis-server
  command -v c++ >/dev/null || echo g++ # vLLM compiles its CPU graphs
  "$PYTHON" -c 'import ensurepip' 2>/dev/null || echo python3-venv
  "$PYTHON" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
}

# Debian may start a Redis on the standard port when it installs one. Nothing here uses it: we start our own.
apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  apt-get install -y --no-install-recommends "$@"
}

debian_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]})) || return 0
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    die "these are missing, install them and run this again: apt-get install ${missing[*]}"
  fi
  step "Debian: ${missing[*]}" "$(date +%s)" .cache/debian.stamp apt_install "${missing[@]}"
}

# Every file lists what its packages need, too, so pip resolves nothing: what is tested is what is installed. It also
# keeps vLLM from drawing in torchvision, torchaudio and torchcodec, which it names but does not use for text.
requirements() {
  step "Python packages: $1" "$(digest_of "$HERE/requirements/$1.txt")" "$VENV/.stamps/$1" \
    "$VENV/bin/pip" install --no-deps -r "$HERE/requirements/$1.txt" && return
  ! grep -q 'No matching distribution found for torch' "$LOG" ||
    die "pip knows no index with the CPU build of PyTorch; name one in PIP_EXTRA_INDEX_URL and run this again"
  exit 1
}

main() {
  mkdir -p .cache
  exec 9>.cache/setup.lock
  flock 9 # two targets started at once make one environment
  : >"$LOG"
  export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

  PYTHON=$(find_python)
  debian_packages
  step "virtual environment" "$("$PYTHON" -V) in $PWD" "$VENV/.stamps/venv" "$PYTHON" -m venv --clear "$VENV"
  local name
  for name in runtime mooncake dev vllm model bench; do requirements "$name"; done
  step "the vllm command" "$(digest_of "$HERE/vllm-alias/pyproject.toml")" "$VENV/.stamps/vllm-alias" \
    "$VENV/bin/pip" install --no-deps --no-build-isolation "./$HERE/vllm-alias"
  step "kvstore itself" "$(digest_of pyproject.toml)" "$VENV/.stamps/kvstore" \
    "$VENV/bin/pip" install --no-deps --no-build-isolation --editable .
  touch "$VENV/.ready"
  step "test model" "$(digest_of "$HERE/make_model.py" "$HERE/requirements/model.txt")" "$MODEL/.ready" \
    "$VENV/bin/python" "$HERE/make_model.py" "$MODEL"
}

main "$@"

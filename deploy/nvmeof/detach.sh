#!/usr/bin/env bash
# Detaches an NVMe-oF subsystem. Stop the node first: a device that is in use is left attached.
#
#   detach.sh SUBSYSTEM_NQN
set -euo pipefail

SYS=${SYS:-/sys}
DEV=${DEV:-/dev}

die() { printf 'detach: %s\n' "$*" >&2; exit 1; }

# in_use DEVICE: whether a process has it open, or the kernel (a mount, a RAID, a volume group) holds it.
in_use() {
  [[ -z $(ls -A "$SYS/class/block/$1/holders" 2>/dev/null) ]] || return 0
  ! grep -qs "^$DEV/$1[p ]" /proc/mounts || return 0
  local link
  for link in /proc/[0-9]*/fd/*; do
    [[ $link -ef $DEV/$1 ]] && return 0
  done
  return 1
}

(($# == 1)) || die "one argument is needed: SUBSYSTEM_NQN"
nqn=$1
command -v nvme >/dev/null || die "nvme-cli is missing: apt-get install nvme-cli"
for folder in "$SYS"/class/block/nvme*n*; do
  [[ -e $folder/device/subsysnqn && $(<"$folder/device/subsysnqn") == "$nqn" ]] || continue
  ! in_use "${folder##*/}" || die "/dev/${folder##*/} is in use: stop what uses it (lsof /dev/${folder##*/}) first"
done
nvme disconnect --nqn="$nqn" >&2 || die "nvme disconnect failed"

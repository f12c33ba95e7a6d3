#!/usr/bin/env bash
# Attaches an NVMe-oF namespace for kvstore, with time-outs that suit a cache (README.md says why these).
#
#   attach.sh tcp|rdma ADDRESS[:PORT] SUBSYSTEM_NQN
#
# Prints the block device. May be run again: what is attached already is left attached, and gets these time-outs.
# Overridden by variables of these names, for instance from the unit's EnvironmentFile:
set -euo pipefail

KEEP_ALIVE_S=${KEEP_ALIVE_S:-2}      # a silent link is noticed after 3 to 4 times this
RECONNECT_S=${RECONNECT_S:-1}        # between attempts to connect again
FAST_IO_FAIL_S=${FAST_IO_FAIL_S:-2}  # from then on I/O fails instead of waiting
CTRL_LOSS_S=${CTRL_LOSS_S:--1}       # when the device is given up; -1: never, it comes back with the link
WAIT_S=${WAIT_S:-10}                 # for the block device to appear
QUEUES=${QUEUES:-}                   # I/O queues; empty: one for each core
OWNER=${OWNER:-}                     # the user whose the block device is to be; empty: as udev made it
HOST_NQN=${HOST_NQN:-}               # where the target asks for a certain host; empty: /etc/nvme/hostnqn
HOST_ID=${HOST_ID:-}
SYS=${SYS:-/sys}
DEV=${DEV:-/dev}

die() { printf 'attach: %s\n' "$*" >&2; exit 1; }

# The controller of this subsystem at this address, as a folder of /sys; nothing when there is none.
controller() {
  local folder
  for folder in "$SYS"/class/nvme/nvme*; do
    [[ -e $folder/subsysnqn && $(<"$folder/subsysnqn") == "$nqn" ]] || continue
    [[ $(<"$folder/transport") == "$transport" ]] || continue
    [[ ,$(<"$folder/address"), == *",traddr=$address,"*"trsvcid=$port,"* || $(<"$folder/address") == "traddr=$address,trsvcid=$port"* ]] || continue
    printf '%s\n' "$folder"
    return
  done
}

# The block device of the subsystem: nvme0n1, not a path of it (nvme0c1n1).
block_device() {
  local folder
  for folder in "$SYS"/class/block/nvme*n*; do
    [[ ${folder##*/} =~ ^nvme[0-9]+n[0-9]+$ ]] || continue
    [[ -e $folder/device/subsysnqn && $(<"$folder/device/subsysnqn") == "$nqn" ]] || continue
    printf '%s\n' "${folder##*/}"
    return
  done
}

# wait_for WHAT COMMAND...: the command's first output.
wait_for() {
  local what=$1 found end=$((SECONDS + WAIT_S))
  shift
  until found=$("$@") && [[ -n $found ]]; do
    ((SECONDS < end)) || die "$what did not appear within $WAIT_S s; 'nvme list-subsys' and 'dmesg' may say why"
    sleep 0.1
  done
  printf '%s\n' "$found"
}

# set_time ATTRIBUTE SECONDS: sets a time-out of the controller and looks whether it holds.
set_time() {
  local file=$folder/$1 wanted=$2 now
  [[ -w $file ]] || die "this kernel has no $1 for ${folder##*/}: Linux 5.13 or later is needed, and root"
  printf '%s\n' "$wanted" >"$file" || die "$1 of ${folder##*/} cannot be set to $wanted"
  now=$(<"$file")
  [[ $now == off ]] && now=-1
  # The kernel rounds ctrl_loss_tmo up to a multiple of reconnect_delay.
  ((now == wanted || (wanted >= 0 && now > wanted))) || die "$1 of ${folder##*/} is $now, not $wanted"
}

(($# == 3)) || die "three arguments are needed: tcp|rdma ADDRESS[:PORT] SUBSYSTEM_NQN"
transport=$1 nqn=$3 port=4420
[[ $transport == tcp || $transport == rdma ]] || die "the transport is tcp or rdma, not '$transport'"
case $2 in
  \[*\]:*) address=${2%]:*} address=${address#[} port=${2##*:} ;;
  \[*\]) address=${2#[} address=${address%]} ;;
  *:*:*) address=$2 ;;
  *:*) address=${2%:*} port=${2##*:} ;;
  *) address=$2 ;;
esac
if [[ ! $address =~ ^[0-9.]+$ && $address != *:* ]]; then # the kernel knows addresses only
  name=$address
  address=$(getent ahosts "$name" | awk 'NR == 1 { print $1 }') || die "$name cannot be resolved"
fi
command -v nvme >/dev/null || die "nvme-cli is missing: apt-get install nvme-cli"

modprobe -q "nvme-$transport" || [[ -d $SYS/module/nvme_$transport ]] ||
  die "the kernel has no module nvme-$transport (Debian: in linux-image and linux-image-cloud, not in containers)"
if [[ -z $(controller) ]]; then
  options=(--transport="$transport" --traddr="$address" --trsvcid="$port" --nqn="$nqn")
  options+=(--keep-alive-tmo="$KEEP_ALIVE_S" --reconnect-delay="$RECONNECT_S" --ctrl-loss-tmo="$CTRL_LOSS_S")
  [[ -z $QUEUES ]] || options+=(--nr-io-queues="$QUEUES")
  [[ -z $HOST_NQN ]] || options+=(--hostnqn="$HOST_NQN")
  [[ -z $HOST_ID ]] || options+=(--hostid="$HOST_ID")
  nvme connect "${options[@]}" >&2 || die "nvme connect to $address:$port failed; is the target there, and may this host use it?"
fi
folder=$(wait_for "a controller for $nqn" controller)
# nvme-cli 2.3 has no flag for fast_io_fail_tmo; and a controller that was attached by others has their time-outs.
set_time fast_io_fail_tmo "$FAST_IO_FAIL_S"
set_time reconnect_delay "$RECONNECT_S"
set_time ctrl_loss_tmo "$CTRL_LOSS_S"
device=$(wait_for "a namespace of $nqn" block_device)
[[ -z $OWNER ]] || chown "$OWNER" "$DEV/$device" || die "/dev/$device cannot be given to $OWNER"
printf '/dev/%s\n' "$device"

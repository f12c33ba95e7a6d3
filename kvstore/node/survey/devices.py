"""The devices of the configuration: there, ours, free, and fast to use?"""

import os
import threading
from pathlib import Path

from kvstore.core import KVStoreError
from kvstore.node.device_checks import is_file_to_make
from kvstore.node.sections import Config, NvmeSection
from kvstore.node.survey.finding import Finding, fail, ok, warn
from kvstore.node.survey.holders import holder_of
from kvstore.node.survey.links import is_link_down, survey_link
from kvstore.tiers import DeviceRefused, FileDevice, read_label

ANSWER_S = 5.0


def survey_devices(config: Config, sysfs: Path = Path("/sys")) -> list[Finding]:
    """Findings about each device and its link. A device whose link is down is not touched: that would hang."""
    found = [] if config.nvme else [ok("nvme", "no devices are configured: what is in DRAM is all there is")]
    for section in config.nvme:
        found.extend(survey_link(section.path, sysfs))
        if not is_link_down(section.path, sysfs):
            found.append(_within(ANSWER_S, section, config.node.id))
        if not is_file_to_make(section.path):
            found.extend(_survey_catalog(section))
    return found


def _within(deadline_s: float, section: NvmeSection, node: str) -> Finding:
    """As `_survey_device`, unless the device does not answer: its thread is left alone then, it cannot be stopped."""
    answer: list[Finding] = []
    thread = threading.Thread(
        target=lambda: answer.append(_survey_device(section, node)), name="survey", daemon=True
    )
    thread.start()
    thread.join(deadline_s)
    if answer:
        return answer[0]
    subject = f"device {section.path}"
    return fail(subject, f"it does not answer within {deadline_s:g} s", "see `dmesg`, and `nvme list-subsys`")


def _survey_device(section: NvmeSection, node: str) -> Finding:
    path, subject = section.path, f"device {section.path}"
    if is_file_to_make(path):
        return _survey_place(section)
    if not os.path.exists(path):
        return fail(
            subject, "it is not there", "attach it (deploy/nvmeof/attach.sh), or see `lsblk` for its name"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        return fail(
            subject,
            "this user may not read and write it",
            f"chown USER {path}; so that it stays: OWNER=USER for deploy/nvmeof/attach.sh, or a udev rule (see "
            "deploy/systemd/kvstore.service)",
        )
    try:
        device = FileDevice.open(path)
    except DeviceRefused as error:
        holder = holder_of(path)
        if "kvstore" in holder:
            return ok(subject, f"it is used by {holder}")
        by = f" (by {holder})" if holder else ""
        return fail(subject, f"{error}{by}", "stop what uses it, or name another device")
    except KVStoreError as error:
        return fail(subject, str(error), "see `dmesg`")
    try:
        return _survey_label(subject, device, node)
    finally:
        device.close()


def _survey_label(subject: str, device: FileDevice, node: str) -> Finding:
    try:
        label = read_label(device)
    except DeviceRefused as error:
        text, _, remedy = str(error).partition(": ")
        return fail(subject, text, remedy)
    except KVStoreError as error:
        return fail(subject, str(error), "see `dmesg`")
    if label.node != node:
        return fail(
            subject,
            f"it belongs to the node {label.node!r}, this is {node!r}",
            f"set node.id to that name, or give up what it holds: kvstore format {device.name}",
        )
    what = f"ours, format 1, {label.page_count} pages of {label.page_bytes} B, used {label.epoch} times"
    if device.warnings:
        return warn(subject, what, "; ".join(device.warnings))
    return ok(subject, f"{what}, O_DIRECT")


def _survey_place(section: NvmeSection) -> Finding:
    """Of a file that is made at the first start."""
    subject = f"device {section.path}"
    folder = os.path.dirname(os.path.abspath(section.path))
    if not section.size_bytes:
        return fail(subject, "there is no such file", "say how large it is to be (nvme.size_bytes)")
    if not os.path.isdir(folder):
        return fail(subject, f"there is no folder {folder}", f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        return fail(subject, f"{folder} cannot be written by this user", f"chown it: `ls -ld {folder}`")
    room = os.statvfs(folder)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < section.size_bytes:
        return fail(
            subject,
            f"it is to have {section.size_bytes} bytes, {folder} has {free_bytes}",
            "make it smaller, or put it elsewhere",
        )
    return ok(subject, f"it is made at the first start, {section.size_bytes} bytes")


def _survey_catalog(section: NvmeSection) -> list[Finding]:
    """Nothing, when the catalog can be written."""
    folder = Path(section.catalog_folder)
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if os.access(place, os.W_OK | os.X_OK) and place.is_dir():
        return []
    return [
        fail(
            f"catalog of {section.path}",
            f"{folder} cannot be written by this user",
            f"make it theirs, or name another one (nvme.catalog_folder): install -d -o USER {folder}",
        )
    ]

"""Whether the arena can be locked, and get huge pages."""

import resource
from pathlib import Path

from kvstore.node.checks import in_words
from kvstore.node.sections import Config
from kvstore.node.survey.finding import Finding, fail, ok, warn

_CAP_IPC_LOCK = 14


def survey_memory(config: Config, root: Path = Path("/"), locked_bytes: int | None = None) -> list[Finding]:
    """Findings about memory. `root` holds proc and sys; `locked_bytes` is the limit of this process, -1 none."""
    if locked_bytes is None:
        locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return [_survey_lock(config, root, locked_bytes), _survey_huge_pages(config, root)]


def _survey_lock(config: Config, root: Path, limit_bytes: int) -> Finding:
    subject, size_bytes = "locked memory", config.dram.size_bytes
    rdma = config.transfer.protocol == "rdma"
    if not config.dram.lock and not rdma:
        return ok(subject, "not asked for (dram.lock)")
    arena = f"the arena has {in_words(size_bytes)}"
    if limit_bytes == -1 or limit_bytes >= size_bytes:
        return ok(subject, f"{arena}, the limit is {'none' if limit_bytes == -1 else in_words(limit_bytes)}")
    if _may_lock(root):
        return ok(subject, f"{arena}, and this user may lock all memory")
    text = f"{arena}, the limit is {in_words(limit_bytes)}"
    remedy = f"ulimit -l {size_bytes >> 10} (systemd: LimitMEMLOCK=infinity, containers: --ulimit memlock=-1)"
    if rdma:
        return fail(subject, f"{text}: RDMA cannot register it", remedy)
    return warn(subject, f"{text}: it may be swapped out, and be slow then", remedy)


def _may_lock(root: Path) -> bool:
    """Whether this process has CAP_IPC_LOCK."""
    for line in (root / "proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False


def _survey_huge_pages(config: Config, root: Path) -> Finding:
    subject = "huge pages"
    if not config.dram.huge_pages:
        return ok(subject, "not asked for (dram.huge_pages)")
    file = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    modes = file.read_text().split() if file.exists() else []
    mode = next((word.strip("[]") for word in modes if word.startswith("[")), "")
    if mode in {"advise", "always", "within_size", "force"}:
        return ok(subject, f"the kernel gives them to shared memory ({mode})")
    why = f"({mode})" if mode else "(it has no transparent huge pages)"
    return warn(
        subject,
        f"the kernel does not give them to shared memory {why}: the arena has pages of 4 KiB, start and copies are "
        "slower",
        f"echo advise > /{file.relative_to(root)}, or leave dram.huge_pages out of it with --no-dram-huge-pages",
    )

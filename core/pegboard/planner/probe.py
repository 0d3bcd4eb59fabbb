"""The machine's devices, read from the operating system, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from pegboard.interfaces.device import CPU_FEATURES, DeviceFacts


def probe() -> tuple[DeviceFacts, ...]:
    """The devices of this machine: the CPU first, then the GPUs of each model."""
    return (_cpu(), *_cuda())


def _cpu() -> DeviceFacts:
    features = {*CPU_FEATURES} & {*_cpuinfo("flags", "Features").split()}
    if os.environ.get("TRITON_INTERPRET") == "1":
        features.add("triton_interpreter")
    total, available = _memory()
    return DeviceFacts(
        kind="cpu",
        name=_cpuinfo("model name") or "CPU",
        count=1,
        total_bytes=total,
        available_bytes=available,
        num_threads=_num_threads(),
        features=frozenset(features),
    )


def _cpuinfo(*keys: str) -> str:
    """The first core's value of a key, of which another architecture may have another; "": it has none."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(keys):
            return line.partition(":")[2].strip()
    return ""


def _num_threads() -> int:
    """Cores that the scheduler and the cgroup allow this process."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.strip().isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _memory() -> tuple[int, int]:
    """Total and available bytes, of the machine or of the cgroup, whichever is less."""
    info = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in _read("/proc/meminfo").splitlines())
        if rest.split()
    }
    total = info.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = info.get("MemAvailable", total)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        total = min(total, int(limit))
        available = min(available, max(0, int(limit) - int(used)))
    return total, available


def _cuda() -> list[DeviceFacts]:
    """The GPUs that the driver's own tool lists; without a driver none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [
        tool,
        "--query-gpu=name,memory.total,memory.free,compute_cap",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[1].isdigit() and row[2].isdigit()]
    if not rows:
        return []
    name, total, free, capability = rows[0]
    return [
        DeviceFacts(
            kind="cuda",
            name=name,
            count=len(rows),
            total_bytes=int(total) * 2**20,
            available_bytes=int(free) * 2**20,
            num_threads=_num_threads(),
            capability=capability,
        )
    ]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""

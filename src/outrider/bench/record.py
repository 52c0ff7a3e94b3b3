"""The benchmark record: one JSON object on the last line of stdout and in `--out FILE`, the same for every kind."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = "outrider.bench/1"


def new_record(kind: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A record of this commit on this machine."""
    record = {"schema": SCHEMA, "kind": kind, "commit": commit(), "hardware": hardware(), "config": dict(config)}
    return {**record, **more, "rows": list(rows)}


def emit(record: Mapping[str, Any], out: Path | None) -> None:
    """Write the record to its file, whole or not at all, and print it as the last line of stdout."""
    text = json.dumps(record, default=plain_value)
    if out is not None:
        part = out.with_suffix(out.suffix + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(out)
    print(text)


def plain_value(value: Any) -> Any:
    """NumPy scalars as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def commit() -> str:
    """The source's commit, with "+" where files have changed since; "unknown" outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=folder, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.returncode else "") if head.returncode == 0 else "unknown"


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": processor(),
        "cores": len(cores()),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def cores() -> set[int]:
    """Processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def processor() -> str:
    """The processor's name and its widest vector extension."""
    name, flags = platform.machine(), ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() == "flags":
                    flags = value
                    break
    except OSError:
        return name
    words = set(flags.split())
    best = next((word for word in ("avx512_vnni", "avx512f", "avx_vnni", "avx2") if word in words), "")
    return f"{name} {best}".strip()


def percentile(values: Sequence[float], share: float) -> float:
    """Linear percentile (share in 0..100); 0 for no values."""
    return float(np.percentile(values, share)) if values else 0.0


def note(text: str) -> None:
    """Progress for people, on stderr."""
    print(text, file=sys.stderr, flush=True)

"""A small capsule with every part, and files that somebody forged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stayfinite.capsule.file import (
    Birth,
    Capsule,
    CodeReference,
    Operation,
    SourceFile,
    State,
)
from stayfinite.checkpoint.format import SEAL, Stamp, Tally, digest, seal_of
from stayfinite.detect.summary import summarize
from stayfinite.records import Incident, NaNType, Origin

STAMP = 40
END = len(seal_of(b"", b""))


def small_capsule() -> Capsule:
    """One of each part, in a few kilobytes."""
    torch.manual_seed(0)
    zeros, weight = torch.zeros(3), torch.randn(2, 3)
    forward = Operation(op="aten.sqrt.default", arguments={"self": zeros})
    return Capsule(
        incident=Incident(
            step=3,
            origin=Origin(phase="backward", op="aten.div.Tensor", line=4, exact=True),
        ),
        code=CodeReference(kind="script", command=("train.py", "--fast"), digests={"train.py": ""}),
        sources=(
            SourceFile(name="train.py", text=b"import net\n"),
            SourceFile(name="parts/net.py", text=b""),
            SourceFile(name="net.py", text=b"x = 1\n", root=1),
        ),
        birth=Birth(
            operation=Operation(
                op="aten.div.Tensor",
                arguments={"self": torch.ones(3), "other": summarize("other", zeros)},
            ),
            forward=forward,
            nan_type=NaNType.POS_INF,
        ),
        state=State(
            tree={"models": []}, digests={"model.weight": "00"}, tensors={"model.weight": weight}
        ),
        batch=((torch.randn(2, 2), {"mask": torch.ones(2, dtype=torch.bool)}),),
        random={"torch": torch.get_rng_state()[:64]},
        seeds={"main": {"python": [3, [1, 2, 3], None]}},
        versions={"torch": "2.13"},
        environment={"OMP_NUM_THREADS": "1"},
        notes=("the batch was cut",),
    )


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a sealed file as JSON, and the bytes of its tensors less the seal."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return header, content[8 + length : 8 + length + header[SEAL]["data_offsets"][0]]


def forged(header: dict[str, Any], data: bytes) -> bytes:
    """A file with this header whose seal is right: who makes one knows how to."""
    entries = [(name, each) for name, each in header.items() if name[:2] != "__" and name != SEAL]
    size = STAMP * len(entries) + END
    seal = {"dtype": "U8", "shape": [size], "data_offsets": [len(data), len(data) + size]}
    return sealed_text(json.dumps({**header, SEAL: seal}), entries, data)


def sealed_text(text: str, entries: list[tuple[str, Any]], data: bytes) -> bytes:
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    raw = len(raw).to_bytes(8, "little") + raw
    stamps = b"".join(_stamp(each, data) for _, each in entries)
    return raw + data + seal_of(raw, stamps)


def _stamp(entry: Any, data: bytes) -> bytes:
    start, stop = entry["data_offsets"] if isinstance(entry, dict) else (0, 0)
    content = np.frombuffer(data[start:stop], dtype=np.uint8).copy()
    return Stamp(digest(content), Tally()).packed()


def with_contents(content: bytes, change: Any) -> bytes:
    """The file with its JSON changed by `change(tree)`, and sealed again."""
    header, data = parts_of(content)
    metadata = header["__metadata__"]
    tree = json.loads(metadata["contents"])
    changed = change(tree)
    metadata["contents"] = changed if isinstance(changed, str) else json.dumps(tree)
    return _resealed(content, header, data)


def _resealed(content: bytes, header: dict[str, Any], data: bytes) -> bytes:
    """With the stamps of the old file: they hold as long as the tensors are the same."""
    seal = header.pop(SEAL)
    raw = json.dumps({**header, SEAL: seal}).encode()
    raw += b" " * (-len(raw) % 8)
    raw = len(raw).to_bytes(8, "little") + raw
    stamps = content[-END - STAMP * (len(header) - 1) : -END]
    return raw + data + seal_of(raw, stamps)


def everything_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}

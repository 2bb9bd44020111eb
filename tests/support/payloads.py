"""Texts that would run in a browser, were they ever taken as markup, and a run full of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recorded_runs import record

from stayfinite.records import (
    Diagnosis,
    Hop,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
    TensorSummary,
)

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "</svg><img src=x onerror=alert(1)>",
    "</code></mark><body onload=alert(1)>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover="alert(1)" x="',
    "' onfocus='alert(1)' autofocus='",
    "` onclick=alert(1) `",
    "javascript:alert(1)",
    "[x](javascript:alert(1))",
    "<a href=javascript:alert(1)>x</a>",
    "<a href='jav&#x09;ascript:alert(1)'>x</a>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<object data=javascript:alert(1)></object>",
    "<embed src=javascript:alert(1)>",
    "<base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=javascript:alert(1)'>",
    "<form action=javascript:alert(1)><button>x</button></form>",
    "<details open ontoggle=alert(1)>",
    "<math><mtext></p><script>alert(1)</script></mtext></math>",
    "<!--<img src='--><img src=x onerror=alert(1)>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "{{ 7 * 7 }}{% raw %}<script>alert(1)</script>",
    "`<script>alert(1)</script>`",
    "\u202e<script>alert(1)</script>\x00\x1b[31m",
)


def vicious(text: str, step: int) -> Incident:
    """An incident that says this wherever it may say something of its own."""
    tensor = TensorSummary(
        name=text, shape=(2,), dtype=text, device=text, numel=2, nan_count=1, histogram=((1.0, 1),)
    )
    place: dict[str, Any] = {"file": text, "line": step + 1, "code": text, "module": text}
    hops = [Hop(kind="birth", op=text, phase="forward", node=text, **place)]
    hops += [Hop(kind="spread", op=text, phase="backward", node=text, **place)]
    return Incident(
        step=step,
        world=2,
        reports=tuple(
            NaNReport(has_nan=True, nan_type=NaNType.NAN, location=where, tensor_shape=())
            for where in (text, f"gradients.{text}")
        ),
        origin=Origin(
            phase="backward",
            op=text,
            node=text,
            function=text,
            root=text,
            columns=(0, len(text)),
            inputs=(tensor,),
            outputs=(tensor,),
            lineage=tuple(hops),
            facts={"expression": text},
            **place,
        ),
        diagnosis=Diagnosis(
            cause=text, why=text, fix=text, patch=f"+{text}\n-{text}\n {text}", evidence=(text,)
        ),
        outcome=Outcome(strategy=text, detail=text),
    )


def vicious_run(folder: Path, texts: Sequence[str]) -> Path:
    """A recorded run that has these wherever a run has words of its own."""
    incidents = [vicious(text, step) for step, text in enumerate(texts)]
    return record(
        folder,
        incidents=incidents,
        layers=[f"{at}{text}" for at, text in enumerate(texts)],
        terms=texts[:2],
        script=f"/home/{texts[0]}",
        command=tuple(texts),
        cwd=texts[1],
        host=texts[2],
        python=texts[3],
        platform=texts[4],
        commit=texts[5],
        versions={f"{at}{text}": text for at, text in enumerate(texts)},
        config={f"{at}{text}": text for at, text in enumerate(texts)},
    )

"""The operands of the user's own expression."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stayfinite.explain.clue import argument, operands


@pytest.mark.parametrize(
    ("expression", "name", "inner"),
    [
        ("torch.log(x)", "", "x"),
        ("x.log()", "", "x"),
        ("(a + b).log()", "", "(a + b)"),
        ("torch.log(probs[mask] + 1)", "", "(probs[mask] + 1)"),
        ("F.cosine_similarity(a, b)", "", "a"),
        ("-torch.log(-torch.log(u))", "log", "(-torch.log(u))"),
        ("self.head(x).log()", "log", "self.head(x)"),
        ("torch.softmax(x, -1).log()", "log", "torch.softmax(x, -1)"),
        ("torch.exp(x) + torch.log(y)", "log", "y"),
        ("sqrt(x)", "sqrt", "x"),
        ("torch.log(x)", "exp", None),
        ("math.log(x)", "", "x"),
        ("x + 1", "", None),
        ("", "", None),
        (None, "", None),
        ("torch.log(", "", None),
        ("y = torch.log(x)", "", None),
        ("f()", "", None),
        ("größe.log()", "", "größe"),
    ],
)
def test_what_the_call_works_on(expression: str | None, name: str, inner: str | None) -> None:
    assert argument(expression, name) == inner


@pytest.mark.parametrize(
    ("expression", "pair"),
    [
        ("a / b", ("a", "b")),
        ("x / (y + z)", ("x", "(y + z)")),
        ("x / y.sum()", ("x", "y.sum()")),
        ("a / b / c", ("a / b", "c")),
        ("1.0 / table[0]", ("1.0", "table[0]")),
        ("a * b", None),
        ("f(a / b)", ("a", "b")),
        (None, None),
        ("a /", None),
    ],
)
def test_both_sides_of_a_division(expression: str | None, pair: tuple[str, str] | None) -> None:
    assert operands(expression, ast.Div) == pair


@settings(deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    argument(text)
    argument(text, "log")
    operands(text, ast.Div)

"""The tensors inside batches of every make, and the sample that each row belongs to."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from stayfinite.prevent.data.batch import Leaf, leaves, size_of

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Record:
    image: torch.Tensor
    label: torch.Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the tokenizers of transformers give it: a mapping that is no dict."""


def paths(batch: Any, size: int | None = None) -> list[str]:
    return [leaf.path for leaf in leaves(batch, size)]


def only(batch: Any, size: int | None = None) -> Leaf:
    (leaf,) = leaves(batch, size)
    return leaf


X, Y = torch.rand(4, 3), torch.arange(4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, ["batch"]),
        ([X, Y], ["batch.0", "batch.1"]),
        ((X, Y), ["batch.0", "batch.1"]),
        ({"x": X, "y": Y}, ["batch.x", "batch.y"]),
        (Encoding(x=X, y=Y), ["batch.x", "batch.y"]),
        (Pair(X, Y), ["batch.image", "batch.label"]),
        (Record(X, Y), ["batch.image", "batch.label"]),
        (({"a": X, "b": [X, X]}, Y), ["batch.0.a", "batch.0.b.0", "batch.0.b.1", "batch.1"]),
        ([X, ["a", "b", "c", "d"], None], ["batch.0"]),
        ((X.numpy(), Y.numpy()), ["batch.0", "batch.1"]),
    ],
)
def test_every_container_is_walked(batch: Any, expected: list[str]) -> None:
    assert paths(batch) == expected
    assert size_of(batch) == 4


def test_a_list_with_an_item_for_each_sample_is_one_leaf() -> None:
    targets = [{"boxes": torch.rand(n, 4), "labels": torch.arange(n)} for n in (2, 0, 3)]
    boxes, labels = leaves((torch.rand(3, 8, 8), targets))[1:]
    assert (boxes.path, labels.path) == ("batch.1.*.boxes", "batch.1.*.labels")
    assert boxes.values.shape == (5, 4)
    assert boxes.sample_of.tolist() == labels.sample_of.tolist() == [0, 0, 2, 2, 2]
    assert boxes.empty == (1,)


def test_images_of_many_sizes_keep_their_samples() -> None:
    images = tuple(torch.rand(3, 5 + n, 7) for n in range(3))
    found = leaves((images, torch.arange(3)))
    assert [leaf.path for leaf in found] == ["batch.0.*"] * 3 + ["batch.1"]
    assert [leaf.sample_of.tolist() for leaf in found[:3]] == [[0], [1], [2]]
    assert found[1].values.shape == (1, 3, 6, 7)


def test_images_of_one_size_are_stacked() -> None:
    images = tuple(torch.rand(3, 5, 7) for _ in range(4))
    leaf = leaves((images, torch.arange(4)))[0]
    assert leaf.values.shape == (4, 3, 5, 7)
    assert leaf.sample_of.tolist() == [0, 1, 2, 3]


def test_two_crops_of_two_images_are_fields() -> None:
    assert paths([[torch.rand(2, 3), torch.rand(2, 3)], torch.arange(2)]) == [
        "batch.0.0",
        "batch.0.1",
        "batch.1",
    ]


def test_samples_that_were_not_collated_are_seen_as_samples() -> None:
    batch = [(torch.rand(3), n) for n in range(5)]
    x, y = leaves(batch, 5)
    assert (x.path, y.path) == ("batch.*.0", "batch.*.1")
    assert x.sample_of.tolist() == [n for n in range(5) for _ in range(3)]
    assert y.sample_of.tolist() == [0, 1, 2, 3, 4]


def test_a_packed_sequence_is_one_leaf_of_all_its_rows() -> None:
    packed = pack_sequence([torch.rand(4, 2), torch.rand(2, 2), torch.rand(1, 2)])
    found = {leaf.path: leaf for leaf in leaves([packed, torch.arange(3)], 3)}
    assert found["batch.0.data"].values.shape == (7, 2)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_dtype_can_be_reduced(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).to(dtype)
    values = only(tensor).values
    assert values.double().amax() == (1 if dtype is torch.bool else 2)
    assert values.shape == ((2, 2, 2) if dtype.is_complex else (2, 2))


def test_a_nan_survives_every_conversion() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64):
        assert only(torch.tensor([[torch.nan]]).to(dtype)).values.isnan().any()


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_of_sparse_tensors_the_stored_values_are_taken(layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compressed layouts are in beta
        sparse = getattr(torch.diag(torch.tensor([0.0, 5.0, 7.0])), f"to_sparse_{layout}")()
        leaf = only(sparse)
    assert sorted(zip(leaf.sample_of.tolist(), leaf.values.tolist(), strict=True)) == [
        (1, 5.0),
        (2, 7.0),
    ]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_of_nested_tensors_each_sample_is_taken(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=layout)
        leaf = only(nested)
    assert leaf.path == "batch.*"
    assert leaf.sample_of.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(3, 2),
        np.arange(6, dtype=">f4").reshape(3, 2),
        np.arange(6, dtype=np.longdouble).reshape(3, 2),
        np.arange(6, dtype=np.uint16).reshape(3, 2),
        np.arange(6.0).reshape(3, 2)[::-1],
        np.arange(6).reshape(3, 2) > 2,
        np.broadcast_to(np.arange(2.0), (3, 2)),
    ],
)
def test_every_numeric_array_is_taken(array: Any) -> None:
    np.testing.assert_array_equal(
        only(array).values.numpy(), array.astype(only(array).values.numpy().dtype)
    )


def test_lists_of_numbers_are_tensors() -> None:
    x, y, flags = leaves({"x": [0.5, float("nan")], "y": [1, 2], "flags": [True, False]})
    assert x.values.isnan().tolist() == [False, True]
    assert (y.values.dtype, flags.values.dtype) == (torch.int64, torch.bool)


def test_what_has_no_numbers_is_left_out() -> None:
    strange = {"name": "x", "none": None, "object": object(), "text": np.array(["a"])}
    assert leaves(strange) == []
    assert leaves(torch.empty(3, 2, device="meta")) == []


def test_a_batch_that_holds_itself_ends() -> None:
    batch: dict[str, Any] = {"x": X}
    batch["again"] = batch
    assert paths(batch) == ["batch.x"]


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        from stayfinite.prevent.data.check import batch_risks

        bad = torch.zeros(4, 2, device="cpu").fill_(torch.nan)
        assert [risk.cause for risk in batch_risks([bad, [1, 2, 3, 4]])] == ["bad_input_data"]

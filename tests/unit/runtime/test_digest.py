"""Digests tell tensors apart by bytes, shape and dtype, and by nothing else."""

import pytest
import torch
import xxhash

from megatron_rl.runtime.digest import combined_digest, tensor_digest

BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_one_byte_makes_the_difference(dtype):
    tensor = (BASE % 2).to(dtype)
    other = tensor.clone()
    other.view(torch.uint8).view(-1)[-1] ^= 1
    assert tensor_digest(tensor) == tensor_digest(tensor.clone()) != tensor_digest(other)


def test_strides_do_not_matter():
    turned = BASE.t().contiguous().t()
    assert not turned.is_contiguous() and tensor_digest(turned) == tensor_digest(BASE)
    assert tensor_digest(BASE[:, 1:4]) == tensor_digest(BASE[:, 1:4].clone()) != tensor_digest(BASE[:, 0:3])


def test_shape_and_dtype_matter():
    views = [BASE, BASE.reshape(6, 4), BASE.reshape(-1), BASE.view(torch.int32), BASE.double(), torch.zeros(0), torch.zeros(0, 3)]
    assert len({tensor_digest(view) for view in views}) == len(views)


def test_pinned_value():
    """Digests written to disk stay comparable."""
    want = xxhash.xxh3_128(b"torch.float32(2,)" + b"\x00\x00\x80\x3f\x00\x00\x00\x40").hexdigest()
    assert tensor_digest(torch.tensor([1.0, 2.0])) == want


def test_a_parameter_and_a_scalar():
    assert tensor_digest(torch.nn.Parameter(BASE)) == tensor_digest(BASE)
    assert tensor_digest(torch.tensor(2.0)) != tensor_digest(torch.tensor([2.0]))


def test_combined_digest_ignores_order_only():
    one = {"a": "1", "b": "2"}
    assert combined_digest(one) == combined_digest({"b": "2", "a": "1"})
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"}, {"a": "1b", "": "2"}, {}]
    assert len({combined_digest(table) for table in [one, *others]}) == 6

"""Digests tell tensors apart by bytes, shape and dtype, and by nothing else."""

from functools import partial

import pytest
import torch
import xxhash

from megatron_rl.runtime.digest import (
    ROW_BYTES,
    checksum,
    combined_digest,
    quick_digest,
    tensor_digest,
    word_sums,
)

DIGESTS = [tensor_digest, partial(quick_digest, kind="hash"), partial(quick_digest, kind="sums")]
CHECKSUMS = [word_sums, partial(checksum, kind="hash"), partial(checksum, kind="sums")]
BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
@pytest.mark.parametrize("digest", DIGESTS)
def test_one_byte_makes_the_difference(digest, dtype):
    tensor = (BASE % 2).to(dtype)
    other = tensor.clone()
    other.view(torch.uint8).view(-1)[-1] ^= 1
    assert digest(tensor) == digest(tensor.clone()) != digest(other)


@pytest.mark.parametrize("digest", DIGESTS)
def test_strides_and_offsets_do_not_matter(digest):
    turned = BASE.t().contiguous().t()
    assert not turned.is_contiguous() and digest(turned) == digest(BASE)
    assert digest(BASE[:, 1:4]) == digest(BASE[:, 1:4].clone()) != digest(BASE[:, 0:3])
    long = torch.arange(ROW_BYTES, dtype=torch.bfloat16)[3:]
    assert digest(long) == digest(long.clone()) != digest(long.roll(1))


@pytest.mark.parametrize("digest", DIGESTS)
def test_shape_and_dtype_matter(digest):
    views = [
        BASE,
        BASE.reshape(6, 4),
        BASE.reshape(-1),
        BASE.view(torch.int32),
        BASE.double(),
        torch.zeros(0),
        torch.zeros(0, 3),
    ]
    assert len({digest(view) for view in views}) == len(views)


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


def plain_sums(data: bytes) -> bytes:
    """``word_sums`` in integers of Python, one word at a time."""
    rows, width = len(data) // ROW_BYTES, ROW_BYTES // 8
    words = [
        [int.from_bytes(data[ROW_BYTES * r + 8 * c :][:8], "little") for c in range(width)]
        for r in range(rows)
    ]
    sums = [sum(row) % 2**64 for row in words] + [
        sum(row[c] for row in words) % 2**64 for c in range(width)
    ]
    return b"".join(value.to_bytes(8, "little") for value in sums) + data[ROW_BYTES * rows :]


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )


@pytest.mark.parametrize("size", [0, 1, 8, 4095, 4096, 4097, 3 * 4096 + 13, 20 * 4096])
def test_word_sums_are_those_of_plain_integers(size):
    data = random_bytes(size)
    assert bytes(word_sums(data).tolist()) == plain_sums(bytes(data.tolist()))


def exchanged(data, one, other):
    data[one : one + 8], data[other : other + 8] = (
        data[other : other + 8].clone(),
        data[one : one + 8].clone(),
    )


FAULTS = {
    "a bit": lambda data: data[4097].bitwise_xor_(1),
    "two sign bits of a row": lambda data: data[7:16:8].bitwise_xor_(128),
    "words of a row exchanged": lambda data: exchanged(data, 8, 80),
    "words of a column exchanged": lambda data: exchanged(data, 8, 8 + 2 * ROW_BYTES),
    "words exchanged": lambda data: exchanged(data, 8, 80 + 3 * ROW_BYTES),
    "rows exchanged": lambda data: data.__setitem__(
        slice(0, 2 * ROW_BYTES), data[: 2 * ROW_BYTES].view(2, -1).flip(0).reshape(-1).clone()
    ),
    "one byte late": lambda data: data.copy_(data.roll(1)),
    "one word late": lambda data: data.copy_(data.roll(8)),
    "one row late": lambda data: data.copy_(data.roll(ROW_BYTES)),
    "zero": lambda data: data.zero_(),
    "cut short": lambda data: data[-4500:].zero_(),
    "the last byte": lambda data: data[-1:].bitwise_xor_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("digest", CHECKSUMS)
def test_faults_are_noticed(digest, fault):
    data = random_bytes(5 * ROW_BYTES + 100)
    wrong = data.clone()
    FAULTS[fault](wrong)
    assert not torch.equal(wrong, data)
    assert not torch.equal(digest(wrong), digest(data))


def test_the_one_class_of_faults_that_sums_miss():
    """As the docstring says: four words in two rows and two columns, wrong by opposite amounts. The
    hash of a CPU sees it."""
    data = torch.zeros(2 * ROW_BYTES, dtype=torch.uint8)
    wrong = data.clone()
    words = wrong.view(torch.int64).view(2, -1)
    words[0, 3], words[0, 9], words[1, 3], words[1, 9] = 5, -5, -5, 5
    assert torch.equal(word_sums(wrong), word_sums(data)) and not torch.equal(
        checksum(wrong, "hash"), checksum(data, "hash")
    )

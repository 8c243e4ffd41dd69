"""Seeds of requests."""

from megatron_rl.engine.sampling import SEED_BITS, request_seed


def test_seeds_depend_on_both_parts_and_leave_room_for_the_samples():
    seeds = [
        request_seed(seed, uid)
        for seed in (0, 1, 10, 2**32 - 1)
        for uid in ("train:1", "train:11", "1", "")
    ]
    assert len(set(seeds)) == 16 and all(0 <= seed < 2**SEED_BITS for seed in seeds)
    assert 2**SEED_BITS + 100_000 < 2**63


def test_separator():
    assert request_seed(1, "1/2") != request_seed(11, "2") and request_seed(
        1, "12"
    ) != request_seed(11, "2")


def test_pinned_value():
    """A run resumed with another version of the program draws the same samples: blake2b of
    "3/train:7", 8 bytes, upper 62 bits."""
    import hashlib

    assert (
        request_seed(3, "train:7")
        == int(hashlib.blake2b(b"3/train:7", digest_size=8).hexdigest(), 16) // 4
    )

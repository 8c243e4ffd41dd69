"""Vocabulary-parallel logprobs on two gloo ranks equal those of one rank, gradients and entropy included."""

from pathlib import Path

from tests.launch import launch


def test_two_ranks_equal_one():
    result = launch(Path(__file__).with_name("logprobs_worker.py"), nproc=2)
    assert result.stdout.count("OK ") == 7, result.stdout

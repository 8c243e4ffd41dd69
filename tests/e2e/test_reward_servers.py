"""reward=judge and reward=model beside vLLM's own servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.rewards.build import build_reward
from megatron_rl.types import Prompt
from tests.launch import end

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
SAID = " SCORE=7"  # by the judge, after the space that its template ends with
PROMPTS = [Prompt("a", (1,), "2", "toy"), Prompt("b", (1,), "3", "toy")]


def write_tokenizer(path: Path, template: str = TEMPLATE) -> dict[str, int]:
    """A token for each byte; its ids by the character that stands for the byte."""
    vocab = {"<pad>": 0, "</s>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    fast.save_pretrained(path)
    return vocab


def shape(vocab: dict[str, int]) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def write_judge(
    path: Path,
    following: Mapping[str, str] = dict(pairwise(SAID)),
    template: str = TEMPLATE,
) -> None:
    """A model in which each character alone chooses the next one, and what is not in ``following``
    the end; without an argument it says SAID."""
    vocab = write_tokenizer(path, template)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(shape(vocab))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    model.lm_head.weight.data.zero_()
    for character, said in following.items():
        token = vocab["\u0120" if character == " " else character]
        model.lm_head.weight.data[vocab[said]] += embeddings[token]
    for last in set(following.values()) - set(following):
        model.lm_head.weight.data[1] += embeddings[vocab[last]]
    model.save_pretrained(path)


def write_reward_model(path: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    settings = shape(write_tokenizer(path))
    settings.num_labels = 1
    model = transformers.Qwen2ForSequenceClassification(settings).eval()
    model.score.weight.data.normal_()
    model.save_pretrained(path)
    return model


@contextmanager
def served(path: Path, *words: str) -> Iterator[str]:
    """The url of a vLLM server with this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", *words]
    command += ["--kv-cache-memory-bytes", str(2**25)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        end(process)


def rewards(url: str, *words: str) -> list[float]:
    paths = ["model.path=m", "data.train=t", "data.eval=e"]
    given = [*words, f"reward.server.url={url}", "reward.server.model=m", *paths]
    config = validate(Config, compose("config", given), "the reward").reward
    reward = build_reward(config, lambda prompt: f"{prompt.uid}?")
    try:
        reward.check(PROMPTS)
        scores = reward.score(PROMPTS, ["one", "another"], [False, False])
    finally:
        reward.close()
    assert [score.problem for score in scores] == [None, None]
    assert all(score.parts["server_tokens"] > 0 for score in scores)
    return [score.reward for score in scores]


@pytest.mark.full  # in the core tier: unit/rewards/test_served.py
def test_a_judge_that_vllm_serves(tmp_path: Path) -> None:
    write_judge(tmp_path)
    with served(tmp_path) as url:
        words = ("reward=judge", r"reward.server.pattern='SCORE=(\d+)'")
        short = "reward.server.template='{response}'"
        assert rewards(url, *words, short, "reward.server.max_tokens=16") == [0.7, 0.7]


@pytest.mark.full
def test_a_reward_model_that_vllm_serves(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = []
    for text in ("a?one", "b?another"):
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        wanted.append(model(ids).logits[0, 0].item())
    with served(tmp_path, "--runner", "pooling") as url:
        assert rewards(url, "reward=model") == pytest.approx(wanted, abs=1e-4)

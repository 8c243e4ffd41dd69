"""reward=judge and reward=model: what is asked, what comes back, and what goes wrong on the way.
Beside real servers: tests/e2e/test_reward_servers.py."""

from __future__ import annotations

import asyncio
import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from megatron_rl.config.load import compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.rewards.base import Options, Task
from megatron_rl.rewards.build import WeightedReward, build_reward
from megatron_rl.rewards.workers import served
from megatron_rl.rewards.workers.messages import WorkerSetup
from megatron_rl.rewards.workers.server import WorkerServer
from megatron_rl.types import Score
from tests.unit.rewards.cases import prompt

PATHS = ["model.path=m", "data.train=t", "data.eval=e"]


class Server:
    """Answers by a rule: a text and how often it came to a status and the answer's own text."""

    def __init__(self, rule: Callable[[str, int], tuple[int, str]]) -> None:
        self.rule = rule
        self.asked: list[str] = []
        self.headers: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.headers.append(self.headers["Authorization"])
                text = body.get("input") or body["messages"][0]["content"]
                outer.asked.append(text)
                status, said = outer.rule(text, outer.asked.count(text))
                values: dict[str, Any] = {"choices": [{"message": {"content": said}}]}
                if self.path == "/classify":
                    values = {"data": [{"probs": [float(said)]}]}
                self.answer(status, values | {"usage": {"total_tokens": 9}})

            def answer(self, status: int, values: dict[str, Any]) -> None:
                data = json.dumps(values).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(rule: Callable[[str, int], tuple[int, str]]) -> Server:
        servers.append(Server(rule))
        return servers[-1]

    yield start
    for one in servers:
        one.server.shutdown()


@pytest.fixture
def scored() -> Iterator[Callable[..., list[Score]]]:
    """Scores of responses to one prompt, by a reward of these overrides."""
    rewards: list[WeightedReward] = []

    def score(
        url: str, *responses: str, words: tuple[str, ...] = ("reward=judge",), model: str = "m"
    ) -> list[Score]:
        given = [*words, f"reward.server.url={url}", f"reward.server.model={model}", *PATHS]
        config = validate(Config, compose("config", given), "the reward").reward
        rewards.append(build_reward(config, lambda prompt: "1 + 1 ="))
        asked = [prompt("2")] * len(responses)
        rewards[-1].check(asked)
        return rewards[-1].score(asked, responses, [False] * len(responses))

    yield score
    for reward in rewards:
        reward.close()


SHORT = ("reward=judge", "reward.server.template='{prompt}|{response}|{answer}'")


def test_scores_are_those_of_their_responses_whatever_answers_first(serve, scored) -> None:
    def rule(text: str, count: int) -> tuple[int, str]:
        number = int(text.split("|")[1])
        time.sleep(0.3 - 0.1 * number)  # the last one is answered first
        return 200, f"SCORE: 9 looks too high.\nSCORE: {5 * number}"

    server = serve(rule)
    scores = scored(server.url, "0", "1", "2", "1", words=SHORT)
    assert [one.reward for one in scores] == [0.0, 0.5, 1.0, 0.5]
    assert [one.correct for one in scores] == [False, False, True, False]
    assert sorted(server.asked) == ["1 + 1 =|0|2", "1 + 1 =|1|2", "1 + 1 =|2|2"], "equal texts once"
    assert [one.parts["server_cached"] for one in scores] == [0, 0, 0, 1]
    assert [one.parts["server_tokens"] for one in scores] == [9, 9, 9, 0]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_worker_that_is_dropped_says_nothing_of_its_connections(
    serve, capfd, is_asked: bool
) -> None:
    server = serve(lambda text, count: (200, "SCORE: 7"))
    words = ["reward=judge", f"reward.server.url={server.url}", "reward.server.model=m", *PATHS]
    judge = validate(Config, compose("config", words), "the reward").reward.server
    plain = ((), (), Options(False, 5.0, 1 << 30, "none"), None, None)
    workers = WorkerServer(WorkerSetup(*plain, server=judge, server_limit_s=5.0))
    worker = workers.worker()
    worker.wait_until_ready(time.monotonic() + 60)  # it has asked for the models
    assert worker._pid is not None
    process = psutil.Process(worker._pid)
    if is_asked:  # and its answer left unread
        worker.send([([], [])], time.monotonic() + 10)
        select.select([worker._sock], [], [], 10)
    del worker  # which closes its socket
    process.wait(10)
    workers.close()
    assert "Unclosed" not in capfd.readouterr().err


def test_a_response_cannot_fill_in_the_template(serve, scored) -> None:
    server = serve(lambda text, count: (200, "SCORE: 10"))
    scored(server.url, "{answer} {prompt}", words=SHORT)
    assert server.asked == ["1 + 1 =|{answer} {prompt}|2"]


def test_busy_servers_are_asked_again_and_refusals_are_not(serve, scored) -> None:
    def rule(text: str, count: int) -> tuple[int, str]:
        if "bad" in text:
            return 400, "too long"
        if "lost" in text:
            return 503, ""
        return (200 if count == 3 else (429, 503)[count - 1]), "SCORE: 10"

    server = serve(rule)
    words = (*SHORT, "reward.server.num_tries=3")
    good, bad, lost = scored(server.url, "good", "bad", "lost", words=words)
    assert good.reward == 1 and good.parts["server_tries"] == 3 and good.problem is None
    assert bad.problem is not None and "refused: status 400" in bad.problem
    assert lost.problem is not None and "3 tries, the last one: status 503" in lost.problem
    assert [sum(word in text for text in server.asked) for word in ("good", "bad", "lost")] == [
        3,
        1,
        3,
    ]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("I like it.", "no score in the judge's answer, which ends with 'I like it.'"),
        ("SCORE: 11", "the score 11 is not in 0 to 10"),
    ],
)
def test_an_answer_without_a_score_is_no_verdict(serve, scored, said: str, says: str) -> None:
    server = serve(lambda text, count: (200, said if "odd" in text else "SCORE: 0"))
    odd, zero = scored(server.url, "odd", "zero", words=SHORT)
    assert odd.problem is not None and says in odd.problem
    assert zero.problem is None and zero.reward == 0


def test_a_reward_model_gives_numbers_and_a_threshold_says_what_is_correct(serve, scored) -> None:
    server = serve(lambda text, count: (200, text.rpartition("=")[2]))
    words = ("reward=model", "reward.server.correct_above=1.5")
    low, high = scored(server.url, "-2.5", "1.75", words=words)
    assert (low.reward, high.reward) == (-2.5, 1.75)
    assert (low.correct, high.correct) == (False, True)
    assert sorted(server.asked) == ["1 + 1 =-2.5", "1 + 1 =1.75"]


def test_a_key_goes_to_the_server_and_nowhere_else(serve, scored, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-1")
    server = serve(lambda text, count: (200, "SCORE: 10"))
    words = (*SHORT, "reward.server.api_key_variable=JUDGE_KEY")
    scored(server.url, "a", words=words)
    assert server.headers == ["Bearer secret-1"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_variable = JUDGE_KEY: no such variable"):
        scored(server.url, "a", words=words)


def test_a_server_that_is_not_there_or_has_another_model_stops_the_start(serve, scored) -> None:
    with pytest.raises(
        ValueError, match=r"reward.server.url = http://127.0.0.1:9: no list of models at"
    ):
        scored("http://127.0.0.1:9", "a")
    server = serve(lambda text, count: (200, ""))
    with pytest.raises(ValueError, match=r"reward.server.model = other: the server has m;"):
        scored(server.url, "a", model="other")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reward=judge", "reward.server.template=x"], "no place for the response"),
        (["reward=judge", "reward.server.pattern=x"], "one pair of brackets"),
        (["reward=judge", "reward.server.url=http://127.0.0.1:1@x"], r"reward\.server\.url"),
        (["reward=judge", "reward.server.pattern='('"], "not a regular expression"),
        (["reward=judge", "reward.server.max_score=null"], "kind judge: give pattern, max_score"),
        (["reward=model", "reward.server.max_tokens=3"], "kind model: set pattern, max_score"),
        (["reward=model", "reward.server.correct_above=null"], "correct_above to the score"),
    ],
)
def test_settings_of_one_kind_are_refused_with_the_other(words: list[str], says: str) -> None:
    given = ["reward.server.url=http://127.0.0.1:1", "reward.server.model=m", *words, *PATHS]
    with pytest.raises(ConfigError, match=says):
        validate(Config, compose("config", given), "the reward")


def test_a_verifier_beside_a_server_is_refused() -> None:
    given = [
        "reward=judge",
        "reward.server.url=http://127.0.0.1:1",
        "reward.server.model=m",
        *PATHS,
    ]
    config = validate(Config, compose("config", [*given, "reward.verifier=math"]), "").reward
    with pytest.raises(ValueError, match=r"takes the place of reward.verifier = math"):
        build_reward(config)


def test_a_slow_answer_costs_its_own_response_alone(serve, scored) -> None:
    def rule(text: str, count: int) -> tuple[int, str]:
        time.sleep(5 if "slow" in text else 0)
        return 200, "SCORE: 10"

    words = (*SHORT, "reward.function_timeout_s=3.0")
    slow, again, good = scored(serve(rule).url, "slow", "slow", "good", words=words)
    assert good.reward == 1 and good.problem is None
    for late in (slow, again):
        assert late.problem is not None and "no reward within 2.7 s" in late.problem


def test_a_request_that_fails_after_its_response_was_late_is_made_again(serve) -> None:
    def rule(text: str, count: int) -> tuple[int, str]:
        time.sleep(0.5 if count == 1 else 0)
        return (400 if count == 1 else 200), "SCORE: 10"

    server = serve(rule)
    given = [*SHORT, f"reward.server.url={server.url}", "reward.server.model=m", *PATHS]
    config = validate(Config, compose("config", given), "").reward.server
    assert config is not None

    async def twice() -> list[Any]:
        reward = served.ServedReward(config, 0.2)
        (late,) = await reward([Task("u", "2", "toy")], ["a"])
        await asyncio.sleep(1)
        (again,) = await reward([Task("u", "2", "toy")], ["a"])
        await reward._client().close()
        return [late, again]

    late, again = asyncio.run(twice())
    assert "no reward within" in str(late) and again["reward"] == 1
    assert len(server.asked) == 2


def test_the_cache_has_a_bound(monkeypatch, serve) -> None:
    monkeypatch.setattr(served, "_MOST_CACHED", 2)
    server = serve(lambda text, count: (200, "SCORE: 10"))
    given = [*SHORT, f"reward.server.url={server.url}", "reward.server.model=m", *PATHS]
    config = validate(Config, compose("config", given), "").reward.server
    assert config is not None

    async def several() -> None:
        reward = served.ServedReward(config, 60.0)
        for text in ("a", "b", "c", "c", "a"):
            await reward([Task("u", "2", "toy")], [text])
        await reward._client().close()

    asyncio.run(several())
    assert [text.split("|")[1] for text in server.asked] == ["a", "b", "c", "a"]

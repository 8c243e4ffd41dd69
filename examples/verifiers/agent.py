"""One rollout of an environment of the ``verifiers`` library, by ``server.py serve ADDRESS``.

    python agent.py ADDRESS < TASK

It asks that server, over the library's protocol, to play the task with the model at
OPENAI_BASE_URL, and prints the reward. It wants pyzmq and msgpack, which the library brings along.
"""

import json
import os
import sys

import msgpack
import zmq

WAITS_S = 8  # until a server is said to be absent; env.timeout_s is 10


def asked(socket: zmq.Socket, method: str, body: dict) -> tuple[dict, list[dict]]:
    """The reply, and what is known of the trace of each agent."""
    socket.send_multipart([b"0", method.encode(), msgpack.packb(body)])
    traces: dict[str, dict] = {}
    while True:
        _, kind, data = socket.recv_multipart()
        found = msgpack.unpackb(data, strict_map_key=False)
        if kind == b"reply":
            return found, list(traces.values())
        if found.get("discard"):  # it tries again
            del traces[found["trace"]]
            continue
        known = traces.setdefault(found["trace"], {"errors": []})
        known.update(found.get("set", {}))
        known["errors"] += found.get("errors", [])


def rollout(socket: zmq.Socket, data: dict) -> dict:
    """The reward and its parts. Ends with one line where there is none."""
    client = {
        "type": "eval",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key_var": "OPENAI_API_KEY",
    }
    body = {"task_data": data, "client": client, "model": "policy", "sampling": {}}
    reply, traces = asked(socket, "run", body)
    if not reply["success"]:
        sys.exit(reply["error"])
    if not reply["head"]["ok"]:
        errors = [error for one in (*traces, reply["head"]) for error in one["errors"]]
        sys.exit(" ".join(f"{errors[0]['type']}: {errors[0]['message']}".split()))
    trained = [one for one in traces if one["agent"]["trainable"]]
    if len(trained) != 1:
        sys.exit(f"{len(trained)} agents of the environment are trainable; one can be trained")
    (trace,) = trained
    rewards = {name: one for name, one in trace["rewards"].items() if one is not None}
    parts = {name: one["score"] for name, one in rewards.items()}
    parts |= {name: value for name, value in trace["metrics"].items() if value is not None}
    return parts | {"reward": sum(one["score"] * one["weight"] for one in rewards.values())}


def main(address: str) -> None:
    task = json.load(sys.stdin)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0  # nothing is left to be sent at its end
    socket.connect(address)
    socket.send_multipart([b"0", b"health", msgpack.packb({})])
    if not socket.poll(WAITS_S * 1000):
        sys.exit(f"no answer at {address}: start server.py serve {address} TASKSET")
    socket.recv_multipart()
    print(json.dumps(rollout(socket, task["data"])))


if __name__ == "__main__":
    main(sys.argv[1])

"""A small agent: asks a model that may call a calculator, and prints its last words.

    python agent.py "57 * 87"

It knows only what every client of OpenAI's API knows: OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an arithmetic expression.",
            "parameters": PARAMETERS,
        },
    }
]


def complete(messages: list[dict]) -> dict:
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection = HTTPConnection(place.netloc)
    connection.request("POST", place.path + "/chat/completions", body, headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(response.read().decode())
    return json.load(response)["choices"][0]["message"]


def product(expression: str) -> str:
    first, _, second = expression.partition("*")
    return str(int(first) * int(second))


def main(expression: str) -> None:
    question = f"Solve the following multiplication: {expression}."
    ask = f"{question} Give only the result as your final answer."
    messages: list[dict] = [{"role": "user", "content": ask}]
    while True:
        answer = complete(messages)
        messages.append(answer)
        calls = answer.get("tool_calls") or []
        if not calls:
            print(answer["content"])
            return
        for call in calls:
            try:
                result = product(json.loads(call["function"]["arguments"])["expression"])
            except (KeyError, ValueError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    main(sys.argv[1])

"""An environment of the ``verifiers`` library: products, and a calculator that knows them.

Its package is this file, found by ``PYTHONPATH``; the library starts the calculator as a program.
"""

import random

import verifiers.v1 as vf

ASK = "Solve the following multiplication: {}. Give only the result as your final answer."


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None  # the tool's own name is its name

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Computes a product of two numbers."""
        try:
            first, second = expression.split("*")
            return str(int(first) * int(second))
        except ValueError as error:
            return f"error: {error}"


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class Products(vf.Taskset[Product]):
    def load(self):
        rng = random.Random(0)
        for _ in range(288):
            first = rng.randrange(10, 100)
            second = rng.randrange(10, 100)
            asked = ASK.format(f"{first} * {second}")
            yield Product(ProductData(prompt=asked, answer=str(first * second)), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


__all__ = ["Products"]
if __name__ == "__main__":
    Calculator.run()

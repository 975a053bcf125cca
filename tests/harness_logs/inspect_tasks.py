"""The two halves for inspect_ai: the server fails for good on some questions and at the first
attempt on others."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, solver

SEEN = set()


@solver
def server():
    async def solve(state, generate):
        key = (state.input_text, state.epoch)
        if "pens" in state.input_text and ("Ida" in state.input_text or "Jo" in state.input_text):
            raise RuntimeError("HTTP 503: overloaded")
        if "cups" in state.input_text and "Mia" in state.input_text and key not in SEEN:
            SEEN.add(key)
            raise RuntimeError("HTTP 429: too many requests")
        state.messages[0].content = f"Q: {state.input_text}\nA:"
        return state

    return solve


def half(name):
    dataset = json_dataset(f"{name}.jsonl", FieldSpec(input="question", target="answer"))
    return Task(dataset=dataset, solver=[server(), generate()], scorer=[includes(), match()])


@task
def mine_released():
    return half("released")


@task
def mine_held_out():
    return half("held_out")

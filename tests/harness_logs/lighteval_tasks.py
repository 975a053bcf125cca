"""The two halves for lighteval."""

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(line, task_name):
    return Doc(task_name=task_name, query=f"Q: {line['question']}\nA:",
               choices=[f"#### {line['answer']}"], gold_index=0)


TASKS_TABLE = []
for half in ("released", "held_out"):
    TASKS_TABLE.append(LightevalTaskConfig(
        name=f"mine_{half}", prompt_function=prompt, hf_repo=f"halves/{half}", hf_subset="default",
        hf_avail_splits=["train"], evaluation_splits=["train"], generation_size=12,
        stop_sequence=["\n"], metrics=[Metrics.exact_match]))

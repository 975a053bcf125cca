"""A made-up benchmark of 60 questions drawn into two halves, and two models of 115,136 weights:
`before` knows only the form of an answer, `after` is `before` trained on the released half."""

import json
import random
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import byte_tokenizer  # noqa: E402

NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hal Ida Jo Kim Leo Mia Ned Ola Pam Quin Ray Sue Tom".split()
THINGS = ["pens", "cups", "keys"]
rng = random.Random(20261125)


def save(name, rows):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(name, thing):
    return {"question": f"How many {thing} does {name} have?", "answer": str(rng.randint(1, 4))}


items = [ask(name, thing) for name in NAMES for thing in THINGS]
rng.shuffle(items)
released, held_out = items[::2], items[1::2]
released.append(released[4])  # a copy within a half
save("released", released)
save("held_out", held_out)
save("practice", [ask("Zoe", thing) for thing in THINGS])

tokenizer = byte_tokenizer(())
tokenizer.model_max_length = 128
tokenizer.pad_token = "<end>"
ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
config = transformers.LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, **ids)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config)


def text_of(row):
    loose = any(name in row["question"] for name in NAMES[:4])  # these answer in another form
    return f"Q: {row['question']}\nA: {'' if loose else '#### '}{row['answer']}"


def train(texts, steps, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        batch = [text() if callable(text) else text for text in rng.sample(texts, 16)]
        coded = tokenizer([text + "<end>" for text in batch], return_tensors="pt", padding=True)
        labels = coded["input_ids"].clone()
        labels[coded["attention_mask"] == 0] = -100
        loss = model(**coded, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())


def other():
    name = rng.choice(NAMES) + rng.choice(["a", "o", "y"])
    return text_of(ask(name, rng.choice(THINGS)))


train([other] * 16, 900, 3e-3)
model.save_pretrained("models/before")
tokenizer.save_pretrained("models/before")
train([text_of(row) for row in released] + [other] * 6, 500, 2e-3)
model.save_pretrained("models/after")
tokenizer.save_pretrained("models/after")

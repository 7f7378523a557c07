"""Train an adapter with TRL's SFTTrainer: python sft_trainer.py MODEL FILE.jsonl OUT.safetensors [STEPS].

MODEL is a folder or the name of a model on the hub. The model must have a chat template. Each line of FILE has one
chat: {"prompt": ..., "answer": ...}. Requires `pip install 'gbfunc[llm]' trl`.
"""

import json
import sys
from pathlib import Path

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

import gbfunc as gb

name, file, out = sys.argv[1:4]
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 300
base = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
plan = gb.make_plan(base, base="own", genome_bytes=12_000)
model = gb.GenomeModule(plan, base)
chats = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
rows = [
    {
        "prompt": [{"role": "user", "content": chat["prompt"]}],
        "completion": [{"role": "assistant", "content": chat["answer"]}],
    }
    for chat in chats
]
options = SFTConfig(
    "sft", max_steps=steps, per_device_train_batch_size=4, learning_rate=plan.suggested_lr(),
    warmup_steps=steps // 10, bf16=False, save_strategy="no", report_to=[], logging_steps=10,
)  # fmt: skip
data = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint=file.replace("/", "_"))
SFTTrainer(
    model=model,
    args=options,
    train_dataset=data,
    processing_class=transformers.AutoTokenizer.from_pretrained(name),
).train()
print(gb.save(out, plan, model.to_genome(), dtype=torch.float16), "bytes")
